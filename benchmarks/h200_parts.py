"""What `h200` measures, one function a part: sizes in, figures out. Nothing here knows of processes or time limits.

Stages of a layer are those of a conversion, by the same functions, with made-up tokens and weights on the device:

    decode     FP8 codes and scales, in memory already, to float32                          bytes
    moments    Hessians of gate and up, then of down, from BF16 inputs, summed in float32   n · C² operations an expert
    gptq       scales, factor, sweep, polish                                                C³ / 3 + (1 + 2 · passes) · R · C²
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from moepress.calibration.expert_tap import expert_inner
from moepress.formats.fp8 import decode_fp8, encode_fp8_block
from moepress.quantize.fp8_to_int4 import press_fp8_plain
from moepress.quantize.gptq import gptq
from moepress.quantize.gptq_batched import cholesky_by_panels, round_block_plain
from moepress.quantize.grid import Grid, dequantize
from moepress.quantize.hessian import add_gram, down_target, gate_up_target, mirror, shrink
from moepress.quantize.polish import move_codes_plain
from moepress.quantize.scale_search import search_scales_plain

Figures = dict[str, Any]
BLOCK = (128, 128)
T, G = 1e12, 1e9


@dataclass(frozen=True)
class Shape:
    """A layer's routed experts. ``tokens``: of the calibration set; each goes to ``top_k`` experts."""

    experts: int
    hidden: int
    inner: int
    top_k: int
    tokens: int

    @property
    def tokens_per_expert(self) -> int:
        return max(1, self.tokens * self.top_k // self.experts)


GLM_5_2 = Shape(256, 6144, 2048, 8, 1 << 20)
KIMI_K2 = Shape(384, 7168, 2048, 8, 1 << 20)
TINY = Shape(4, 256, 128, 2, 512)


@dataclass
class Clock:
    """Seconds by stage; the device is waited for before and after each."""

    device: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.wait()
        started = time.perf_counter()
        yield
        self.wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def best_rate(amount: float, work: Callable[[], object], device: str, tries: int = 10) -> float:
    """``amount`` a second in the best of some tries, after one that does not count."""
    clock = Clock(device)
    work()
    for number in range(tries):
        with clock.stage(str(number)):
            work()
    return amount / min(clock.seconds.values())


def ceilings(device: str, smoke: bool) -> Figures:
    """What the machine can do at most: products, memory, and the way there."""
    size, mega = (256, 1) if smoke else (8192, 1024)
    found: Figures = {"torch": torch.__version__, "device": device, "triton": _triton_version()}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rate = best_rate(2 * size**3, lambda a=a, b=b: torch.mm(a, b), device)
        found[f"{str(dtype).removeprefix('torch.')}_tflops"] = rate / T
    wide = torch.empty(mega << 20, dtype=torch.uint8, device=device)
    other = torch.empty_like(wide)
    found["memory_copy_gbps"] = best_rate(2 * wide.numel(), lambda: other.copy_(wide), device) / G
    host = torch.empty(mega << 20, dtype=torch.uint8, pin_memory=device == "cuda")
    found["to_device_gbps"] = best_rate(host.numel(), lambda: wide.copy_(host, non_blocking=True), device, 4) / G
    found["from_device_gbps"] = best_rate(host.numel(), lambda: host.copy_(wide, non_blocking=True), device, 4) / G
    return found


def kernels(device: str, smoke: bool) -> Figures:
    """Every kernel against its twin. A check is {"worst", "tolerance", "ok"}; a kernel without Triton says so."""
    checks: dict[str, Figures] = {}
    g = torch.Generator().manual_seed(0)
    grid, rows, block = Grid(4, 32), 48 if smoke else 4096, 32 if smoke else 128

    def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(device) for tensor in tensors]

    def check(name: str, mine: torch.Tensor, twin: torch.Tensor, tolerance: float) -> None:
        scale = float(twin.double().abs().max()) or 1.0
        worst = float((mine.double() - twin.double()).abs().max()) / scale
        checks[name] = {"worst": worst, "tolerance": tolerance, "ok": worst <= tolerance}

    codes, blocks = there(*encode_fp8_block(torch.randn(rows, 256, generator=g) * 0.02))
    here = (
        decode_fp8(codes.cpu(), blocks.cpu(), block=BLOCK)
        if _compiled()
        else codes.cpu().float() * _spread(blocks, rows).cpu()
    )
    check("decode_fp8", decode_fp8(codes, blocks, block=BLOCK).cpu(), here, 0.0)
    x = torch.randn(512, 384, generator=g).bfloat16()
    total = torch.zeros(384, 384, device=device)
    add_gram(total, x.to(device))
    mirror(total)
    check("gram_bf16", total.cpu(), x.double().t() @ x.double(), 1e-5)
    spd = torch.randn(2, 600, 900, generator=g)
    matrix = spd @ spd.transpose(1, 2) / 900
    upper = matrix.to(device).clone()
    good = cholesky_by_panels(upper)
    check("cholesky_by_panels", upper.triu().cpu(), torch.linalg.cholesky(matrix.double(), upper=True), 1e-4)
    checks["cholesky_by_panels"]["ok"] &= bool(good.all())
    if _triton_version() is None:
        return {"checks": checks, "skipped": "Triton is not installed: fused kernels were not checked"}

    from moepress.quantize.triton_block import round_block_triton
    from moepress.quantize.triton_fp8 import press_fp8_triton
    from moepress.quantize.triton_polish import move_codes_triton
    from moepress.quantize.triton_scales import search_scales_triton

    packed, plain = press_fp8_triton(codes, blocks, BLOCK, grid), press_fp8_plain(codes, blocks, BLOCK, grid)
    check("press_fp8 words", packed[0], plain[0], 0.0)
    check("press_fp8 scales", packed[1], plain[1], 0.0)
    weight, importance = there(torch.randn(2, rows // 4, 256, generator=g) * 0.02, torch.rand(2, 256, generator=g))
    spread = importance[:, None].expand(-1, rows // 4, -1).reshape(-1, 32)
    twin = search_scales_plain(weight.view(-1, 32), spread, 8, grid).view(2, rows // 4, 8)
    check("search_scales", search_scales_triton(weight, importance, grid), twin, 0.0)
    upper = (torch.randn(2, block, block, generator=g) * 0.1).triu(1) + torch.eye(block) * 0.7
    target, feedback = (torch.randn(2, block, rows, generator=g) for _ in range(2))
    scales = torch.rand(2, block, rows, generator=g) * 0.2 + 0.1
    on = there(target, scales, upper, feedback * 0.1)
    mine = round_block_triton(*on, grid)
    plain_block = round_block_plain(*on[:3], on[3].clone(), grid)
    for name, ours, theirs, tolerance in zip(
        ("codes", "errors", "loss"), mine, plain_block, (0.0, 0.0, 1e-9), strict=True
    ):
        check(f"round_block {name}", ours, theirs, tolerance)
    h = (upper.transpose(1, 2) @ upper).to(device).contiguous()
    by_group = on[1][:, :: 32 if block >= 32 else block].contiguous()
    starts = mine[0].clone(), mine[0].clone()
    gradient = on[3] * 3
    steps = torch.empty_like(gradient), torch.empty_like(gradient)
    fell = move_codes_triton(gradient.clone(), h, starts[0], by_group, 32, grid, steps[0])
    fell_plain = move_codes_plain(gradient.clone(), h, starts[1], by_group, 32, grid, steps[1])
    check("move_codes codes", starts[0], starts[1], 0.0)
    check("move_codes loss", fell, fell_plain, 1e-9)
    return {"checks": checks}


def rtn(device: str, smoke: bool) -> Figures:
    """FP8 to packed INT4, source bytes a second: from the device's memory, and from pinned host memory."""
    rows, columns = (256, 256) if smoke else (8 * 6144, 6144)
    grid = Grid(4, 32)
    some, block_scales = encode_fp8_block(torch.randn(256, columns) * 0.02)
    codes = some.to(device).view(torch.uint8).repeat(rows // 256, 1).view(torch.float8_e4m3fn)
    blocks = block_scales.repeat(rows // 256, 1).to(device)
    press = press_fp8_plain
    if device == "cuda" and _triton_version() is not None:
        from moepress.quantize.triton_fp8 import press_fp8_triton

        press = press_fp8_triton
    host = torch.empty(codes.shape, dtype=torch.uint8, pin_memory=device == "cuda")
    host.copy_(codes.view(torch.uint8))

    def from_host() -> None:
        press(host.to(device, non_blocking=True).view(torch.float8_e4m3fn), blocks, BLOCK, grid)

    groups = rows * columns // 32
    return {
        "gbps": best_rate(codes.numel(), lambda: press(codes, blocks, BLOCK, grid), device, 5) / G,
        "from_host_gbps": best_rate(codes.numel(), from_host, device, 3) / G,
        "bytes_moved_per_weight": 1 + 0.5 + 2 * groups / codes.numel(),
    }


def layer(
    device: str, smoke: bool, shape: Shape, *, hessian: str, passes: int, experts: int, seconds: float
) -> Figures:
    """GPTQ of the routed experts of one layer, block by block, until all are done or the time is over.

    Args:
        hessian: "blend" or "layer", as in the recipe.
        passes: most polish passes.
        experts: stop after so many; figures say how many were done, and what a whole layer takes at that rate.
        seconds: begin no block after this.
    """
    shape = TINY if smoke else shape
    grid, clock, started = Grid(4, 32), Clock(device), time.perf_counter()
    with clock.stage("making up data"):
        torch.manual_seed(0)
        x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        x.mul_(torch.rand(shape.hidden, device=device, dtype=torch.bfloat16).pow_(3).add_(0.05))
        source = [_source(2 * shape.inner, shape.hidden, device), _source(shape.hidden, shape.inner, device)]
    held = _experts_in_a_block(device, shape)
    with clock.stage("moments"):
        pooled = torch.zeros(shape.hidden, shape.hidden, device=device)
        for some in x.split(1 << 16):
            add_gram(pooled, some)
        mirror(pooled)
        pooled *= 2 / shape.tokens
    done, losses = 0, list[float]()
    wanted = min(experts, shape.experts)
    while done < wanted and (done == 0 or time.perf_counter() - started < seconds):
        block = min(held, wanted - done)
        _press_block(block, x, source, pooled, shape, hessian, passes, grid, clock, losses)
        done += block
    work = {name: spent for name, spent in clock.seconds.items() if name != "making up data"}
    counts = _operations(shape, hessian, passes, done)
    figures: Figures = {
        "experts": done,
        "experts_of_layer": shape.experts,
        "experts_at_once": held,
        "tokens_per_expert": shape.tokens_per_expert,
        "hessian": hessian,
        "passes": passes,
        "seconds": sum(work.values()),
        "seconds_a_layer": sum(work.values()) * shape.experts / done,
        "stages": work,
        "moments_tflops": counts["moments"] / work["moments"] / T,
        "gptq_tflops": counts["gptq"] / work["gptq"] / T,
        "fallbacks": sum(math.isnan(loss) for loss in losses),
        "loss_mean": sum(losses) / len(losses),
    }
    if device == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    return figures


def _press_block(
    block: int,
    x: torch.Tensor,
    source: list[tuple[torch.Tensor, torch.Tensor]],
    pooled: torch.Tensor,
    shape: Shape,
    mode: str,
    passes: int,
    grid: Grid,
    clock: Clock,
    losses: list[float],
) -> None:
    n = shape.tokens_per_expert
    with clock.stage("making up data"):
        tokens = [torch.randperm(shape.tokens, device=x.device)[:n] for _ in range(block)]
    with clock.stage("decode"):
        gate_up, down = (torch.stack([decode_fp8(*pair, block=BLOCK) for _ in range(block)]) for pair in source)
    hessians = pooled
    if mode != "layer":
        with clock.stage("moments"):
            target = gate_up_target(pooled)
            hessians = torch.zeros(block, shape.hidden, shape.hidden, device=x.device)
            for slot, mine in enumerate(tokens):
                add_gram(hessians[slot], x[mine])
                mirror(hessians[slot])
                hessians[slot] = shrink(hessians[slot] * (2 / n), target, n)
    with clock.stage("gptq"):
        result = gptq(gate_up, hessians, grid, passes=passes)
    losses += [outcome.loss for outcome in result.outcomes]
    with clock.stage("moments"):
        served = dequantize(result.weight.codes, result.weight.scales).bfloat16()
        hessians = torch.zeros(block, shape.inner, shape.inner, device=x.device)
        for slot, mine in enumerate(tokens):
            add_gram(hessians[slot], expert_inner(x[mine], served[slot]))
            mirror(hessians[slot])
            own = hessians[slot] * (2 / n)
            hessians[slot] = shrink(own, down_target(own, n, 1.0), n)
    del served, gate_up, result
    with clock.stage("gptq"):
        result = gptq(down, hessians, grid, passes=passes)
    losses += [outcome.loss for outcome in result.outcomes]


def _operations(shape: Shape, mode: str, passes: int, experts: int) -> dict[str, float]:
    c, i, n = shape.hidden, shape.inner, shape.tokens_per_expert
    moments = shape.tokens * c**2 + experts * n * (i**2 + 2 * 2 * i * c + (0 if mode == "layer" else c**2))
    factors = (c**3 / 3 if mode == "layer" else experts * c**3 / 3) + experts * i**3 / 3
    return {"moments": moments, "gptq": factors + experts * (1 + 2 * passes) * (2 * i * c**2 + c * i**2)}


def _experts_in_a_block(device: str, shape: Shape) -> int:
    """As `convert.forecast.calibration_cost.block_bytes` sizes them: matrices of C² four times, weights five times."""
    if device != "cuda":
        return 2
    free = torch.cuda.mem_get_info()[0] * 0.5
    each = 4 * (5 * 3 * shape.inner * shape.hidden + 4 * shape.hidden**2)
    return max(1, min(shape.experts, int(free // each)))


def _source(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = encode_fp8_block(torch.randn(rows, columns) * columns**-0.5)
    return codes.to(device), scale


def _spread(blocks: torch.Tensor, rows: int) -> torch.Tensor:
    return blocks.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)


def _compiled() -> bool:
    return hasattr(importlib.import_module("numba"), "__version__")


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return str(importlib.import_module("triton").__version__)
