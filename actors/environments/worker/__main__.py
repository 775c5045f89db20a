"""Start of a worker process: `PYTHON .../worker/__main__.py ADDRESS NAME PARENT PROCESSES [VARIABLE …]`.

Loads the package under a name of its own, so that nothing of ours comes before the user's modules in the search path.
"""

import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "grpo_environment_worker"


def main() -> None:
    """Serve the actor at the address on the command line until told to stop."""
    address, name, parent, processes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # set for this interpreter alone: processes of the user's must not inherit them
    for variable in sys.argv[5:]:
        os.environ.pop(variable, None)
    folder = Path(__file__).resolve().parent
    # Python before 3.11 knows no -P, and has put this folder first
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # noqa: PT018 - for the type checker
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    if parent and sys.platform == "linux":
        # before the rest is imported: the guard needs none of it
        importlib.import_module(f"{PACKAGE}.guard").guarded(parent, processes)
    importlib.import_module(f"{PACKAGE}.service").run(address, name)


if __name__ == "__main__":
    main()
