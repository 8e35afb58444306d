"""What a machine is asked: with stand-ins for the GPUs and the systems that this one does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo.errors import BadInput
from specdemo.system import device as device_module
from specdemo.system import hardware
from specdemo.system.cpu_level import SWITCH

from ..sentences import refuses

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Event:
    """Stands for `torch.cuda.Event`; `clock` is the GPU's, in milliseconds. Until it is reached it has no time."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at, self.stream, self.reached, self.waits = -1.0, "", False, 0

    def record(self, stream: str) -> None:
        self.at, self.stream = Event.clock, stream

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached, self.waits = True, self.waits + 1

    def elapsed_time(self, end: Event) -> float:
        assert end.reached
        return end.at - self.at


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for `torch.cuda` on a machine with two GPUs; `asked` is what was called, in order."""
    asked: list[Any] = []
    fake = SimpleNamespace(
        asked=asked,
        Event=Event,
        bf16=True,
        capability=(9, 0),
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda device: asked.append(("set_device", device)),
        synchronize=lambda device: asked.append(("synchronize", device)),
        current_stream=lambda device: f"stream of {device}",
        get_device_name=lambda device: f"name of {device}",
    )
    fake.is_bf16_supported = lambda including_emulation: fake.bf16 or including_emulation
    fake.get_device_capability = lambda device: fake.capability
    monkeypatch.setattr(torch, "cuda", fake)
    sdp = SimpleNamespace(enable_cudnn_sdp=lambda on: asked.append(("cudnn", on)))
    monkeypatch.setattr(torch.backends, "cuda", sdp)
    return fake


# The device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "auto"])
def test_a_gpu_is_chosen_where_there_is_one(asked: str | None, cuda: SimpleNamespace) -> None:
    assert hardware.choose_device(asked) == GPU
    assert cuda.asked == [("cudnn", False)]  # which would plan anew for every length of a text


@pytest.mark.parametrize("asked", [None, "auto", "cpu", "cpu:0"])
def test_the_cpu_is_chosen_where_there_is_no_gpu(asked: str | None, cuda: SimpleNamespace) -> None:
    """With a fake `torch.cuda`, and as on a Mac whose own GPU torch could use: the CPU is what was tested."""
    cuda.is_available = lambda: False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert hardware.choose_device(asked) == CPU
    assert cuda.asked == []


def test_a_gpu_by_its_number_becomes_the_current_one(cuda: SimpleNamespace) -> None:
    assert hardware.choose_device("cuda:1") == torch.device("cuda:1")
    assert cuda.asked == [("set_device", torch.device("cuda:1")), ("cudnn", False)]
    assert hardware.choose_device("cpu") == CPU
    assert len(cuda.asked) == 2


def test_a_second_device_is_the_draft_models(cuda: SimpleNamespace) -> None:
    for asked, found in (("cuda,cpu", CPU), ("cuda:0,cuda:1", torch.device("cuda:1")), (None, None), ("cuda", None)):
        assert hardware.choose_devices(asked)[1] == found
    assert ("set_device", torch.device("cuda:1")) not in cuda.asked  # the target's is the current one
    for wrong in ("cpu,tpu", "cpu,cpu,cpu"):
        with refuses(BadInput, "device"):
            hardware.choose_devices(wrong)


def test_a_gpu_that_is_not_there_is_refused(cuda: SimpleNamespace) -> None:
    with refuses(BadInput, "2: 2."):
        hardware.choose_device("cuda:2")
    cuda.is_available = lambda: False
    for name in ("cuda", "cuda:0"):
        with refuses(BadInput, "NVIDIA AMD"):
            hardware.choose_device(name)


# The number type -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_the_dtype_of_a_gpu_is_the_one_that_it_does_not_emulate(
    bf16: bool, expected: torch.dtype, cuda: SimpleNamespace
) -> None:
    cuda.bf16 = bf16
    assert hardware.choose_dtype("auto", GPU) == expected
    assert hardware.choose_dtype("float32", GPU) == torch.float32


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.float16, (7, 5), False),
        (torch.float16, (8, 0), True),
        (torch.bfloat16, (9, 0), True),
        (torch.float32, (9, 0), False),
    ],
)
def test_where_attention_copies_no_keys(
    dtype: torch.dtype, capability: tuple[int, int], expected: bool, cuda: SimpleNamespace
) -> None:
    cuda.capability = capability
    assert hardware.attends_in_groups(dtype, GPU, masked=False) == expected
    assert not hardware.attends_in_groups(dtype, GPU, masked=True)
    assert hardware.attends_in_groups(dtype, CPU, masked=True)


# Transfers and clocks --------------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU, and keeps how it was asked to go elsewhere."""

    asked: list[tuple[torch.device, bool]]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def to(self, device: torch.device, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        self.asked.append((device, non_blocking))
        return torch.zeros(2)


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("cuda:0", False), ("cuda:1", False)])
def test_only_what_comes_from_a_gpu_to_the_cpu_is_waited_for(device: str, waits: bool) -> None:
    """With a fake tensor: read on the CPU before it is there, it would be whatever lay in that memory."""
    tensor = torch.zeros(2).as_subclass(Elsewhere)
    tensor.asked = []
    device_module.to_device(tensor, torch.device(device))
    assert tensor.asked == [(torch.device(device), not waits)]


def test_token_ids_and_tensors_become_tensors_on_a_device() -> None:
    """That a copy to a GPU waits for nothing is a test of tests/gpu: a round waits once."""
    ids, floats = device_module.to_device([3, 1], CPU), torch.tensor([0.5])
    assert (ids.tolist(), ids.dtype) == ([3, 1], torch.long)
    assert device_module.to_device(floats, CPU) is floats
    assert device_module.to_device([3, 1], torch.device("meta")).device.type == "meta"


def test_a_gpu_is_timed_by_its_own_clock(cuda: SimpleNamespace) -> None:
    stamps: list[device_module.Timestamp] = []

    def work() -> None:
        stamps.append(device_module.timestamp(GPU))
        Event.clock += 250

    assert device_module.seconds_of(GPU, work) == 0.25
    (stamp,) = stamps
    assert isinstance(stamp, Event)
    assert stamp.stream == "stream of cuda"
    later = device_module.timestamp(GPU)
    assert isinstance(later, Event)
    for _ in range(2):
        assert device_module.elapsed_seconds(stamp, later) == 0.25
    assert later.waits == 1  # only where the GPU has not got there yet


def test_a_cpu_is_timed_by_the_wall_clock(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock, and a fake `torch.cuda` that is asked for nothing."""
    times = iter([3.0, 3.5])
    monkeypatch.setattr(device_module.time, "perf_counter", lambda: next(times))
    work: Callable[[], object] = list
    assert device_module.seconds_of(CPU, work) == 0.5
    assert cuda.asked == []


def test_a_device_goes_by_the_name_its_maker_gave_it(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_name", lambda: "a CPU")
    assert hardware.device_name(torch.device("cuda:1")) == "name of cuda:1"
    assert hardware.device_name(CPU) == "a CPU"


# The CPU and its memory ----------------------------------------------------------------------------------


def test_dtype_follows_the_cpu() -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "flags" not in flags:
        pytest.skip("no x86 flags to compare with")
    chosen = hardware.choose_dtype("auto", torch.device("cpu"))
    assert chosen == (torch.bfloat16 if "avx2" in flags else torch.float32)


@pytest.mark.parametrize(
    ("capabilities", "engine", "expected"),
    [
        ({"avx2": True, "avx512_bf16": True}, "x86", torch.bfloat16),
        ({"avx2": True, "amx_bf16": True}, "x86", torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, "x86", torch.bfloat16),
        ({"avx2": True}, "fbgemm", torch.bfloat16),
        ({"avx2": True}, "qnnpack", torch.float32),
        ({"avx2": False}, "x86", torch.float32),
        ({"neon": True}, "qnnpack", torch.bfloat16),
        ({"neon": True, "bf16": True}, "qnnpack", torch.bfloat16),
        ({}, "none", torch.float32),
    ],
)
def test_the_dtype_of_other_cpus(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], engine: str, expected: torch.dtype
) -> None:
    """Never float16, which is no faster than bfloat16 on a CPU and lacks its range."""
    monkeypatch.delenv(hardware.C_SWITCH, raising=False)
    monkeypatch.setattr(hardware, "_capabilities", lambda: capabilities)
    monkeypatch.setattr(hardware, "quantized_engine", lambda: engine)
    monkeypatch.setattr(hardware, "c_compiler", lambda: ("cc",))
    assert hardware.choose_dtype("auto", torch.device("cpu")) == expected
    if "neon" in capabilities:  # torch's own products of 16 bits were not measured there
        for change in (
            lambda patch: patch.setattr(hardware, "c_compiler", lambda: None),
            lambda patch: patch.setattr(hardware.platform, "system", lambda: "Windows"),
            lambda patch: patch.setenv(hardware.C_SWITCH, "0"),
        ):
            with monkeypatch.context() as patch:
                change(patch)
                assert hardware.choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2", "fma3", "f16c", "avx512_f", "avx512_bw"}, "avx512"),
        ({"avx2", "fma3", "f16c", "avx512_f"}, "avx2"),
        ({"avx2", "fma3"}, None),
        ({"neon"}, "neon"),
        (set(), None),
    ],
)
def test_the_best_instructions_of_a_cpu(
    capabilities: set[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(hardware, "_capabilities", lambda: dict.fromkeys(capabilities, True))
    assert hardware.cpu_instructions() == expected
    assert hardware.cpu_features() == sorted(capabilities)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The only folder of programs, empty, and no package that is a compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    hardware.c_compiler.cache_clear()
    yield tmp_path
    hardware.c_compiler.cache_clear()


def program(folder: Path, name: str, status: int = 0) -> str:
    (folder / name).write_text(f"#!/bin/sh\nexit {status}\n")
    (folder / name).chmod(0o755)
    hardware.c_compiler.cache_clear()
    return str(folder / name)


def test_the_compiler_is_the_first_that_there_is(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.c_compiler() is None
    monkeypatch.setattr(hardware, "find_spec", lambda name: name == "ziglang" or None)
    hardware.c_compiler.cache_clear()
    assert hardware.c_compiler() == (sys.executable, "-m", "ziglang", "cc")
    for name in ("clang", "gcc"):
        path = program(programs, name)
        assert hardware.c_compiler() == (path,)
    monkeypatch.setenv("CC", "aarch64-gcc --sysroot=a")
    hardware.c_compiler.cache_clear()
    assert hardware.c_compiler() == ("aarch64-gcc", "--sysroot=a")


@pytest.mark.parametrize("status", [0, 2])
def test_a_mac_has_a_compiler_only_with_its_developer_tools(
    status: int, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them its gcc asks the person to install them."""
    monkeypatch.setattr(hardware.platform, "system", lambda: "Darwin")
    program(programs, "xcode-select", status)
    path = program(programs, "gcc")
    assert hardware.c_compiler() == (None if status else (path,))


@pytest.mark.parametrize(
    ("capabilities", "dtype", "device", "expected"),
    [
        ("avx512_bf16", torch.float16, "cpu", torch.float32),
        ("avx512_bf16", torch.bfloat16, "cpu", torch.bfloat16),
        ("avx512_bf16", torch.float32, "cpu", torch.float32),
        ("avx512_bf16", torch.float16, "cuda", torch.float16),
        ("avx512_f", torch.bfloat16, "cpu", torch.float32),
        ("avx512_f", torch.bfloat16, "cuda", torch.bfloat16),
        ("avx512_f", torch.float64, "cpu", torch.float64),
    ],
)
def test_a_cpu_only_stores_what_it_has_no_products_of(
    monkeypatch: pytest.MonkeyPatch, capabilities: str, dtype: torch.dtype, device: str, expected: torch.dtype
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(hardware, "_capabilities", lambda: {"avx2": True, capabilities: True})
    monkeypatch.setattr(hardware, "quantized_engine", lambda: "x86")
    assert hardware.compute_dtype(dtype, torch.device(device)) == expected


def test_dtype_can_be_asked_for() -> None:
    assert hardware.choose_dtype("float32", torch.device("cpu")) == torch.float32
    assert hardware.choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    with refuses(BadInput, "'int3' auto, float32, bfloat16,"):
        hardware.choose_dtype("int3", torch.device("cpu"))


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "", "cuda:x", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with refuses(BadInput, "no"):
        hardware.choose_device(name)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (
            {
                "memory.max": "900\n",
                "memory.current": "700\n",
                "memory.stat": "anon 5\nactive_file 30\ninactive_file 70\n",
            },
            300,
        ),
        ({"memory.max": "max\n", "memory.current": "700\n", "memory.stat": "active_file 0\ninactive_file 0\n"}, 5000),
        (
            {
                "memory/memory.limit_in_bytes": "9000\n",
                "memory/memory.usage_in_bytes": "8500\n",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 20\ntotal_active_file 0\n",
            },
            520,
        ),
        ({"memory.max": "600\n", "memory.current": "700\n", "memory.stat": "active_file 0\ninactive_file 0\n"}, 0),
        ({}, 5000),
    ],
)
def test_a_container_has_no_more_memory_than_it_is_allowed(
    files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    assert hardware.free_memory() == free


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        (
            "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\nflags\t: avx2\n\n",
            "AMD EPYC",
            "cpu family 26, model 2, stepping 1",
        ),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", "a processor", None),  # ARM
        (None, "a processor", None),  # not Linux
    ],
)
def test_a_cpu_is_told_by_its_name_and_by_its_makers_numbers(
    text: str | None, name: str, model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(hardware.platform, "processor", lambda: "a processor")
    monkeypatch.delenv(SWITCH, raising=False)
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert (hardware.cpu_name(), hardware.cpu_model()) == (name, model)
