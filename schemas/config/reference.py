"""The page docs/reference/configuration.md: every key of run.yaml, from the configuration classes."""

import inspect
import os.path
import re
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from schemas.config.json_schema import TYPE_IS_OPTIONAL
from schemas.config.keys import Key, Sections, keys_in, sections_at, type_of
from schemas.config.resume import key_classes
from schemas.config.run import RunConfig
from schemas.config.tables import choices, default_of, in_cell, table_of

INTRODUCTION = """# Configuration

Every key of `run.yaml`. This page is generated from the configuration classes (`make docs`).

`actors check run.yaml` checks a file and names every problem with its key. A key that is not on this page is an error.
`actors schema` prints the same keys as a JSON Schema for editors. Any key can be set on the command line:
`actors up run.yaml trainer.learning_rate=1e-5 environments.0.name=letters` (items of a list by number, from 0).

Three keys are required, and `reward` where the examples are no environments with rewards of their own:

```yaml
model: {path: Qwen/Qwen3-0.6B}
environments:
  - {type: jsonl, path: train.jsonl}
reward:
  functions:
    - {path: rewards.py:score}
trainer: {max_steps: 200}
```

## Reading the tables

- **Type** has the bounds of the value too. Values are not converted: `"1"` is not an integer.
- **Default**: "see there" means that each key of the section has its own default.
- **Of** lists the types of the section that have the key.
- **Meaning**: "Empty" is `null`, or `""` for text.
- **Resume** tells what happens if the value is not the value with which the run in `output_dir` was started.
  `actors check run.yaml --resume OUTPUT_DIR` compares the two.

| Resume | A changed value |
| --- | --- |
| free | The run continues with the new value. |
| repack | The run continues. Steps that are not trained yet are packed into micro-batches again. |
| identity | The run is refused: its groups would get another meaning. `actors up --fork` makes another run of it. |

A fork starts from the newest checkpoint. Groups sampled after the checkpoint are dropped.

| Word | Meaning |
| --- | --- |
| completion, group | one sampled answer; all completions of one prompt |
| step | one training step, on `packer.groups_per_step` groups |
| version | the policy's weights after a number of steps |
| actor | one process of a run: rollout, reward, packer, trainer or inference |
| engine | the program that samples: inside the inference actor, or a vLLM or SGLang server behind it |
| logp, q | logprob of a token under the trainer's weights; under the engine that sampled the token |
| P1, P2, … | rules of docs/internals/protocol.md |
"""
FOLDER = "docs/reference"
"""Folder of the page."""
CITED = re.compile(r"\bdocs/([\w/-]+)\.md\b")
"""Page named in a document. Editors and error texts show the path; here the name is a link."""
NAMES: dict[Any, str] = {bool: "`true` or `false`", int: "integer", float: "number", str: "text"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def configuration_page() -> str:
    """Return the whole page as Markdown."""
    paths = list(_section_paths([RunConfig], ""))
    contents = "".join(f"{'  ' * path.count('.')}- [`{path}`](#{anchor(path)})\n" for path in paths)
    parts = [INTRODUCTION, "## Sections\n", contents, "## Top level\n", _table({RunConfig: []}, "")]
    for path in paths:
        sections = sections_at(path.replace("[]", ""), RunConfig)
        level = "##" if "." not in path else "###"
        parts += [f"{level} `{path}`\n", _introduction(sections, path), _table(sections, f"{path}.")]
    return CITED.sub(_link, "\n".join(parts))


def _link(cited: re.Match[str]) -> str:
    """Return a link to a page by its name, relative to the folder of the configuration's page."""
    return f"[{cited[1].rpartition('/')[2]}]({os.path.relpath(cited[0], FOLDER)})"


def anchor(path: str) -> str:
    """Return the fragment of a section's heading, as GitHub and MkDocs make it: no dots, no brackets."""
    return "".join(letter for letter in path if letter.isalnum() or letter == "_")


def _section_paths(sections: Sections, prefix: str) -> Iterator[str]:
    """Yield the dotted paths of all sections in the order of the keys, `reward.functions[]` for a list of sections."""
    # by name, not by key: several types of a section may have the same section inside
    for name in dict.fromkeys(key.name for key in keys_in(sections)):
        keys = keys_in(sections, name)
        inner = [section for key in keys for section in key.sections]
        if inner:
            path = f"{prefix}{name}[]" if keys[0].is_list else f"{prefix}{name}"
            yield path
            yield from _section_paths(inner, f"{path}.")


def _introduction(sections: dict[type[BaseModel], list[str]], path: str) -> str:
    """Return the docstring of a section's class, or a table of the section's types."""
    if len(sections) > 1 and all(type_of(section) for section in sections):
        optional = [type_of(section) for section in sections if section.__name__ in TYPE_IS_OPTIONAL]
        required = f"Without the key `type` it is `{optional[0]}`." if optional else "The key `type` is required."
        rows = [["`type`", "What it is"], ["---", "---"]]
        rows += [[f"`{type_of(section)}`", in_cell(_docstring(section))] for section in sections]
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        return f"{required} Resume: {_resume(f'{path}.type')}.\n\n{table}"
    # the nearest base of all classes: of the compat sections, the class without the keys of single losses
    shared = next(base for base in next(iter(sections)).__mro__ if all(issubclass(one, base) for one in sections))
    return f"{_docstring(shared)}\n"


def _resume(path: str) -> str:
    """Return the resume class of a key; `see there` for a section whose keys have several classes."""
    path = path.replace("[]", "")
    # the whole section, so that a section of one class needs no look at its table
    classes = {key_class for name, key_class in key_classes().items() if f"{name}.".startswith(f"{path}.")}
    return key_classes()[path] if len(classes) == 1 else "see there"


def _docstring(section: type[BaseModel]) -> str:
    return inspect.getdoc(section) or ""


def _table(sections: dict[type[BaseModel], list[str]], prefix: str) -> str:
    """Return the table of the keys of a section, with type, default and resume class."""

    def resume(key: Key) -> str:
        return _resume(f"{prefix}{key.name}")

    def kind(key: Key) -> str:
        return type_text(key, f"{prefix}{key.name}")

    return table_of(sections, [("Type", kind), ("Default", _default), ("Resume", resume)])


def _default(key: Key) -> str:
    if key.field.default is None:
        return "`null`"
    return '`""`' if key.field.default == "" else default_of(key)


def type_text(key: Key, path: str) -> str:
    """Return the type of a key with its bounds, for example `integer ≥ 1`; for a section a link to its table.

    Args:
        key: the key.
        path: dotted path of the key.
    """
    annotation, marks = key.field.annotation, key.field.metadata
    if key.sections:
        target = f"{path}[]" if key.is_list else path
        text = f"[{'list of sections' if key.is_list else 'section'}](#{anchor(target)})"
    else:
        text = _plain_type(annotation)
    # in front of the noun: "non-empty list", where "≥ 1" would read as a bound of the items
    if any(getattr(mark, "min_length", None) == 1 for mark in marks):
        text = f"non-empty {text}"
    bounds: list[str] = []
    for mark in marks:
        for name, sign in SIGNS.items():
            if (bound := getattr(mark, name, None)) is not None:
                bounds.append(f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}")
        if maximum := getattr(mark, "max_length", None):
            bounds.append(f"with at most {maximum} items")
        if pattern := getattr(mark, "pattern", None):
            bounds.append(f"matching `{pattern}`")
    null = " or `null`" if NoneType in get_args(annotation) else ""
    return in_cell(f"{text} {', '.join(bounds)}".strip() + null)


def _plain_type(annotation: Any) -> str:
    """Return the name of a type without sections."""
    if annotation in NAMES:
        return NAMES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    # an item of a list, with bounds that the document of the key tells
    if origin is Annotated:
        return _plain_type(arguments[0])
    if values := choices(annotation):
        return ", ".join(f"`{value}`" for value in values)
    if origin is list:
        return f"list of {_plain_type(arguments[0])}"
    if origin is dict:
        return f"map of {_plain_type(arguments[0])} to {_plain_type(arguments[1])}"
    if arguments:
        return " or ".join(_plain_type(member) for member in arguments if member is not NoneType)
    return "any value"
