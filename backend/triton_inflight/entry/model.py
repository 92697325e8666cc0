"""What Triton loads for every model of ``backend: "inflight"``: the adapter of the installed package.

Triton puts this file's directory on the module path, so it stands alone in it.
"""

import sys

try:
    from triton_inflight.adapter import TritonPythonModel as TritonPythonModel
    from triton_inflight.parent_watch import end_with_parent
except ImportError as error:
    raise ImportError(
        f"backend 'inflight' runs in Python {sys.version.split()[0]} of {sys.prefix}, where the package "
        f"triton-inflight cannot be imported ({error}). Install it there with `pip install triton-inflight`, or start "
        "tritonserver with the bin directory of an environment that has it first in PATH"
    ) from error

end_with_parent()
