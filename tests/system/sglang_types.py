"""Runs beside SGLang's package: holds bodies against its types. `python sglang_types.py < said.json > judged.json`.

Consumes {"calls": [[path, body]], "answers": [[path, body]]} as the engine and the stub have said them, and prompts
with images. Emits what is wrong with them, answers made by SGLang's own code, and the prompts that its code makes. What
needs a GPU is stood in for: `triton`, two modules of images, and IPython.
"""

import ast
import dataclasses
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch  # before its `triton` is stood in for

ABSENT = {
    "sglang.srt.managers.schedule_batch": (
        "Modality MultimodalProcessorOutput ReturnHiddenStatesMode SamplingLogprobsMode get_return_hidden_states_mode"
    ),
    "sglang.srt.multimodal.mm_utils": "has_valid_data",
}
for name in ("triton", "triton.language", "IPython", "IPython.display"):
    sys.modules[name] = MagicMock(name=name)
for name, wanted in ABSENT.items():
    sys.modules[name] = types.ModuleType(name)
    for thing in wanted.split():
        setattr(sys.modules[name], thing, type(thing, (dict,), {"__init__": lambda self, *_: None}))

import msgspec  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402
from sglang.api.v1 import api_types as api  # noqa: E402
from sglang.srt.managers import io_struct as io  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.utils import weight_versions as spans  # noqa: E402
from sglang.version import __version__  # noqa: E402

VOCABULARY = 30
ASKED = {
    "/update_weights_from_disk": io.UpdateWeightFromDiskReqInput,
    "/update_weight_version": io.UpdateWeightVersionReqInput,
    "/pause_generation": io.PauseGenerationReqInput,
    "/continue_generation": io.ContinueGenerationReqInput,
    "/abort_request": io.AbortReq,
    "/load_lora_adapter": io.LoadLoRAAdapterReqInput,
    "/unload_lora_adapter": io.UnloadLoRAAdapterReqInput,
}
ANSWERED = {
    "/update_weights_from_disk": io.UpdateWeightFromDiskReqOutput,
    "/load_lora_adapter": io.LoRAUpdateOutput,
    "/unload_lora_adapter": io.LoRAUpdateOutput,
}
ROOT = Path(importlib.util.find_spec("sglang").origin).parent  # type: ignore[union-attr, arg-type]


def source(*parts: str) -> str:
    """The text of files of the package."""
    return "".join((ROOT / part).read_text(encoding="utf-8") for part in parts)


def fields(kind: Any) -> set[str]:
    """Of a message."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return {field.name for field in msgspec.structs.fields(kind)}


def check_call(path: str, body: Any) -> None:
    """Build what SGLang builds of a body; unknown fields, which it would ignore, are errors here."""
    if f'"{path}"' not in source("srt/entrypoints/http_server.py"):
        raise ValueError("no such endpoint")
    if body is None:
        return
    if path != "/generate":
        if unknown := body.keys() - fields(ASKED[path]):
            raise ValueError(f"unknown {unknown}")
        TypeAdapter(ASKED[path]).validate_python(body)
        return
    request = io.GenerateReqInput(**body)
    request.normalize_batch_and_arguments()
    assert request.is_single
    SamplingParams(**body["sampling_params"]).verify(VOCABULARY)
    api.GenerateRequest.from_json_value(body)


def check_answer(path: str, body: Any) -> None:
    """Read an answer of the stub with SGLang's types; what these do not have the stub must not say."""
    if path == "/generate":
        api.GenerateResponse.from_json_value(body)
        kinds = {None: api.GenerateResponse, "meta_info": api.GenerateMetaInfo}
        unknown = {key for part, kind in kinds.items() for key in (body[part] if part else body).keys() - fields(kind)}
    elif path == "/server_info":
        known = source("srt/arg_groups/field_order.py", "srt/managers/scheduler.py", "srt/entrypoints/http_server.py")
        unknown = {key for key in body if f'"{key}"' not in known}
    elif path == "/v1/models":
        [card] = re.findall(r"class ModelCard.*?\n\n\n", source("srt/entrypoints/openai/protocol.py"), re.DOTALL)
        unknown = {key for one in body["data"] for key in one if f"    {key}: " not in card}
    elif path in ANSWERED:
        unknown = body.keys() - fields(ANSWERED[path])
    else:
        unknown = {key for key in body or {} if f'"{key}"' not in source("srt/entrypoints/http_server.py")}
    if unknown:
        raise ValueError(f"unknown {unknown}")


def problems(check: Any, said: list[Any]) -> list[str]:
    """What is wrong, by path."""
    found = []
    for path, body in said:
        try:
            check(path, body)
        except Exception as error:
            found.append(f"{path}: {type(error).__name__}: {error}: {body}")
    return found


def made() -> dict[str, Any]:
    """Answers by SGLang's own code: three tokens, the third under a second version, with each way to end."""
    tokens, logprobs = [5, 8, 11], [-0.5, None, -0.25]
    events = [spans.WeightVersionEvent(old_version="b:1.1.1", num_output_tokens=2)]
    meta: dict[str, Any] = {}
    spans.add_weight_versions_to_meta_info(
        meta, spans.compute_weight_version_spans(events, "b:1.2.2", len(tokens)), len(tokens)
    )
    ends = {"stop": {"type": "stop", "matched": 11}, "length": {"type": "length", "length": 3}}
    ends |= {"abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}}
    answers = {}
    for name, end in ends.items():
        values = [logprob or -1.0 for logprob in logprobs]
        answers[name] = api.GenerateResponse.from_json_value(
            {
                "text": "beh",
                "output_ids": tokens,
                "meta_info": {
                    "id": "7",
                    "finish_reason": end,
                    "output_token_logprobs": [[v, t, None] for v, t in zip(values, tokens, strict=True)],
                    "output_top_logprobs": [[[-0.1, 4, None], [-0.5, t, None]] for t in tokens],
                    **meta,
                },
            }
        ).to_json_value()
    nan = json.loads(json.dumps(answers["stop"]))
    entry = api.LogprobEntry(logprob=logprobs[1], token_id=8).to_json_value()
    nan["meta_info"]["output_token_logprobs"][1] = entry
    return answers | {"nan": nan}


def method(name: str) -> Any:
    """A method of the class that makes prompts with images; its module needs packages for GPUs, its code needs none."""
    [found] = [
        node
        for node in ast.walk(ast.parse(source("srt/multimodal/processors/base_processor.py")))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    found.decorator_list = []
    scope: dict[str, Any] = {"Modality": types.SimpleNamespace(IMAGE="image", VIDEO="video", AUDIO="audio")}
    lines = "from __future__ import annotations\n" + ast.unparse(found)
    exec(compile(lines, name, "exec"), scope)
    return scope[name]


def prompts_of(asked: dict[str, Any]) -> list[list[int]]:
    """The prompt by the way for prepared images, and by the way for others."""
    merge, image = 2, asked["image"]
    processor = types.SimpleNamespace(IM_TOKEN_ID=image, spatial_merge_size=merge)
    grids = [torch.tensor([1, *grid]) for grid in asked["grids"]]
    prepared, _, _ = method("build_input_ids")(processor, asked["ids"], img_grid_thw=grids)
    counts = [int(grid.prod()) // merge**2 for grid in grids]
    return [[int(token) for token in prepared], method("_expand_input_ids")(asked["ids"], counts, image)]


def main() -> None:
    """See the module."""
    said = json.load(sys.stdin)
    words = "adapter that has never been loaded"
    json.dump(
        {
            "version": __version__,
            "problems": problems(check_call, said["calls"]) + problems(check_answer, said["answers"]),
            "answers": made(),
            "prompts": [prompts_of(asked) for asked in said["prompts"]],
            "words": words in source("srt/managers/tokenizer_manager.py"),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
