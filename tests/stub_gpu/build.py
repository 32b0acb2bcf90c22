"""Build the stub GPU for the installed PyTorch: a library for LD_PRELOAD.

python -m tests.stub_gpu.build FOLDER    prints the variables that a program on the stub is started with
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("stubgpu.c")
_TORCH = Path(torch.__file__).parent
_USERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
_RUNTIME = r"(__)?cuda[A-Z]|cublas|cudnnCreate$|cudnnSetStream|cudnnDestroy$"
_PRODUCT = r"cublas[SDCZ]?(gemm|gemv|dot|Gemm|Dot|trsm)|cublasLtMatmul$"
# The wheel has the runtime's headers without those of the compiler, which define these.
_COMPILER_MACROS = """#pragma once
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ inline
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
"""
_CONTEXT = """int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
"""


class CannotBuildError(Exception):
    """The stub cannot be built here; the message says what is missing."""


def stub_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of a program on the stub, built in the folder if it is not there yet."""
    if torch.version.cuda is None:
        raise CannotBuildError("this PyTorch is built without CUDA, so there is nothing to put a stub GPU under")
    if not (shutil.which("gcc") and shutil.which("nm")):
        raise CannotBuildError("gcc and nm are needed to build the stub GPU, and one of them is not installed")
    parts = (SOURCE.read_bytes(), Path(__file__).read_bytes(), torch.__version__.encode())
    built = folder.resolve() / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder))
        _build(made)
        try:
            made.rename(built)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    # Kernels of Triton would be compiled by it, and Triton finds no driver.
    return {"LD_PRELOAD": str(built / "libstubgpu.so"), "LD_LIBRARY_PATH": str(built), "TORCH_DISABLE_NATIVE_JIT": "1"}


def _build(folder: Path) -> None:
    wanted = set().union(*(_undefined(_TORCH / "lib" / user, _RUNTIME) for user in _USERS))
    own = set(re.findall(r"^(?:\w+ \**)+\**(\w+)\(", SOURCE.read_text(), re.MULTILINE))
    rest = sorted(wanted - own)
    lines = ["long stub_product(void);"]
    lines += [f"long {name}(void) {{ return {'stub_product()' if re.match(_PRODUCT, name) else 0}; }}" for name in rest]
    (folder / "rest.c").write_text("\n".join(lines))
    # PyTorch's compiler of kernels links the driver, which a machine without a GPU lacks.
    driver = _undefined(_TORCH / "lib" / "libcaffe2_nvrtc.so", "cu[A-Z]")
    others = sorted(driver - set(re.findall(r"int (\w+)\(", _CONTEXT)))
    (folder / "driver.c").write_text(_CONTEXT + "".join(f"long {name}(void) {{ return 0; }}\n" for name in others))
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text(_COMPILER_MACROS)
    headers = next(path.parent for path in (_TORCH.parent / "nvidia").glob("*/include/cuda_runtime_api.h"))
    compiler = ["gcc", "-O2", "-shared", "-fPIC", "-w", f"-I{folder}", f"-I{headers}"]
    runtime = [SOURCE, folder / "rest.c", "-o", folder / "libstubgpu.so"]
    subprocess.run([*compiler, *runtime], check=True)
    library = ["-Wl,-soname,libcuda.so.1", folder / "driver.c", "-o", folder / "libcuda.so.1"]
    subprocess.run([*compiler, *library], check=True)


def _undefined(library: Path, pattern: str) -> set[str]:
    names = subprocess.run(["nm", "-D", "-u", library], capture_output=True, text=True, check=True).stdout.split()
    return {name.partition("@")[0] for name in names if re.match(pattern, name)}


if __name__ == "__main__":
    for variable, value in stub_environment(Path(sys.argv[1])).items():
        print(f"export {variable}={value}")
