"""Pure functions of the GPU benchmark, and the wheels that it needs."""

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.profiling import busy_and_whole, group_of, grouped
from benchmarks.machine import ROOT

GPU = ROOT / "benchmarks" / "gpu"
WHEELS = ROOT / "benchmarks" / "gpu_wheels.txt"
THERE = {"torch", "transformers", "peft", "triton"}
"""Packages that a GPU machine is expected to have, with all that they need."""


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm", "gemm"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("triton_tem_fused_flex_attention_backward_0", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>", "optimizer"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("void at::native::indexSelectLargeIndex<c10::BFloat16>", "gather and scatter"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", "elementwise"),
        ("triton_poi_fused_mul_silu_1", "elementwise"),
        ("ampere_sgemm_32x32_sliced1x4_nn", "gemm"),
        ("aten::mm", "gemm"),
        ("aten::mul", "elementwise"),
        ("aten::copy_", "copies"),
        ("void something_else()", "other"),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, group: str) -> None:
    """Names as torch's profiler shows them."""
    assert group_of(name) == group


def test_times_are_summed_by_group() -> None:
    """Longest first."""
    assert grouped([("aten::mul", 1.0), ("aten::mm", 3.0), ("aten::add", 1.5)]) == {"gemm": 3.0, "elementwise": 2.5}


def test_overlapping_kernels_are_busy_once() -> None:
    """From 0 to 3 and from 5 to 6, in any order."""
    assert busy_and_whole([(5, 6), (1, 3), (0, 2), (1, 2)]) == (4.0, 6.0)
    assert busy_and_whole([]) == (0.0, 0.0)


def _pins(path: Path) -> dict[str, str]:
    lines = [line.partition("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, _, version in lines if not name.startswith("#")}


def _needed(names: set[str]) -> set[str]:
    """Return packages with all that they need, as far as installed here."""
    found: set[str] = set()
    waiting = {str(canonicalize_name(name)) for name in names}
    while waiting:
        name = waiting.pop()
        found.add(name)
        try:
            requirements = map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            continue
        wanted = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
        waiting |= {str(canonicalize_name(one)) for one in wanted} - found
    return found


def test_the_wheels_are_the_versions_of_this_release() -> None:
    """A pin that constraints.txt has too is the same."""
    pins, released = _pins(WHEELS), _pins(ROOT / "constraints.txt")
    assert pins
    assert {name: released[name] for name in pins if name in released} == {
        name: version for name, version in pins.items() if name in released
    }


def test_the_wheels_are_all_that_a_machine_with_torch_lacks() -> None:
    """A new dependency of the project has to be added to the list."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("dependencies = [")[2].partition("]")[0]
    ours = {Requirement(text).name for text in re.findall(r'"(.+?)"', lines)}
    assert len(ours) > 10
    assert _needed(ours) - _needed(THERE) - set(_pins(WHEELS)) == set()


@pytest.mark.parametrize("path", sorted(GPU.glob("*.py")), ids=lambda path: path.stem)
def test_phases_import_nothing_of_the_development_environment(path: Path) -> None:
    """The tests' witness checker is imported where its absence is handled."""
    allowed = set(sys.stdlib_module_names) | {"torch", "numpy", "bitsandbytes", "liger_kernel"}
    allowed |= {"actors", "bus", "schemas", "benchmarks", "examples"}
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    others = {name for name in found if name.partition(".")[0] not in allowed}
    assert others <= {"tests.ring.witness_checker"}
