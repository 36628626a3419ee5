"""Where triton is not installed (it comes with torch on Linux alone), its kernels are not there to be tested."""

from importlib.util import find_spec

BY_INTERPRETER = [f"tests/kernels/test_{name}.py" for name in ("kernels", "stem")]
collect_ignore_glob = [] if find_spec("triton") else ["fednca/kernels/*", "tests/gpu/*", *BY_INTERPRETER]
