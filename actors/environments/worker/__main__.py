"""Start of a worker process: `PYTHON .../actors/environments/worker/__main__.py ADDRESS NAME PARENT [VARIABLE …]`.

Loads the package under a name of its own, so that nothing of ours comes before the user's modules in the search path.
"""

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path

PACKAGE = "grpo_environment_worker"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Serve the rollout actor at the address on the command line until told to stop."""
    address, name, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # set for this interpreter alone: processes of the user's must not inherit them
    for variable in sys.argv[4:]:
        os.environ.pop(variable, None)
    if parent and sys.platform == "linux":
        library = ctypes.CDLL(None)
        # without this an environment that hangs would outlive a rollout actor that was killed
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # processes whose parent has ended stay below this one, where they are counted and killed
        library.prctl(PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != parent:
            sys.exit(f"the rollout actor (process {parent}) ended before its worker {name} had started")
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
    importlib.import_module(f"{PACKAGE}.service").run(address, name)


if __name__ == "__main__":
    main()
