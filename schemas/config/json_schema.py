"""JSON Schema of run.yaml, for editors. Like `actors check` it rejects unknown keys, wrong types and wrong values.

Rules between sections (`schemas.config.rules`) are not part of the schema.
"""

from typing import Any

from schemas.config.run import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPE_IS_OPTIONAL = ("AdamWConfig",)
"""Names of union members that a map without `type` stands for."""


def json_schema() -> dict[str, Any]:
    """Return the schema, with `type` required in the members of unions.

    Pydantic alone leaves `type` optional, since the key has a default in each member. A map without `type` would then
    fit several members and fail `oneOf`, or fit a single member by chance and pass.
    """
    schema = RunConfig.model_json_schema()
    for name, section in schema["$defs"].items():
        kind = section.get("properties", {}).get("type")
        # `type` of a section outside unions has a choice of values
        if kind is None or "const" not in kind:
            continue
        first_line = section.get("description", "").splitlines()[0] if section.get("description") else name
        kind.setdefault("description", f"`{kind['const']}`: {first_line}")
        if name not in TYPE_IS_OPTIONAL:
            section["required"] = [*dict.fromkeys(["type", *section.get("required", [])])]
    return {"$schema": DIALECT, **schema}
