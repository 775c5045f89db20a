"""Callbacks of a script: those that another process can import, with constant arguments."""

from typing import Any

from actors.imports.job import Import, Unreadable
from actors.imports.syntax import Call, Imported, Method
from actors.imports.trl.inputs import Inputs, plain_value
from actors.imports.trl.rewards import path_of, text_of_value

_INSIDE = ("ProgressCallback", "PrinterCallback", "DefaultFlowCallback")
"""Callbacks of transformers that `actors up` has in another form."""
_WITH_MODEL = ("LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WinRateCallback")
"""Callbacks of TRL that read the trainer's model or its data."""


def callbacks(job: Import, inputs: Inputs) -> None:
    """Write the callbacks of the trainer's call. Called after the rewards."""
    call = inputs.trainer_call
    found = call.kwargs.get("callbacks") if call is not None else None
    if "callbacks" not in job.given or not isinstance(found, list | tuple) or not found:
        job.refuse_unless("callbacks", (None, [], ""), "the list can't be read", "write it as callbacks in run.yaml")
    else:
        items, problems = _items(found, inputs)
        if problems:
            job.refuse("callbacks", "; ".join(problems), "write them as callbacks in run.yaml")
        else:
            keys = {f"callbacks.{i}.{name}": value for i, item in enumerate(items) for name, value in item.items()}
            job.convert("callbacks", keys, f"{len(items)} in a process of their own, which reads, and may stop the run")
    script = inputs.followed
    added = (
        [one for one in script.calls if isinstance(one.function, Method) and one.name == "add_callback"]
        if script
        else []
    )
    for one in added:
        job.note(f"{one.source} in line {one.line} is not translated; write it as callbacks in run.yaml")


def _items(found: list[Any] | tuple[Any, ...], inputs: Inputs) -> tuple[list[dict[str, Any]], list[str]]:
    """Return items of `callbacks`, and what stands in the way of each other one."""
    items, problems = list[dict[str, Any]](), list[str]()
    for one in found:
        made = one.function if isinstance(one, Call) else one
        arguments = plain_value(one.kwargs) if isinstance(one, Call) else {}
        path, text = path_of(made, inputs), text_of_value(one)
        name = path.rpartition(":")[2] if path else ""
        if path is None:
            problems.append(f"{text} can't be imported by another process")
        elif name in _WITH_MODEL:
            problems.append(f"{name} reads the trainer's model, which is in another process")
        elif name in _INSIDE and isinstance(made, Imported):
            problems.append(f"{name} is for the origin's own loop; `actors top` shows the progress")
        elif isinstance(one, Call) and (one.args or one.is_partial):
            problems.append(f"{text} has arguments without names")
        elif any(isinstance(value, Unreadable) for value in arguments.values()):
            problems.append(f"the arguments of {text} can't be read")
        else:
            items.append({"path": path} | ({"kwargs": arguments} if arguments else {}))
    return items, problems
