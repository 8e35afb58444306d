"""That what needs no model imports no torch, and that nothing wants a certain system."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDING = next((ROOT / "presets" / "recordings").glob("*.jsonl.gz"))
REPLAY = """
from pathlib import Path
from specdemo.racing.figures import LaneFigures
from specdemo.racing.lanes import StopStrings
from specdemo.racing.trace import read_trace, trace_lines
from specdemo.racing.verdict import LaneVerdict
from specdemo.ui.replay.playable import playable
header, entries = read_trace(trace_lines(Path(sys.argv[1])))
lanes = [[entry.event for entry in entries if entry.lane == lane] for lane in ("plain", "speculative")]
assert LaneVerdict(*map(LaneFigures.of, lanes)).finding
header["drafter"], header["settings"]["temperature"] = "layer-skip", 0.0
# Another last token makes the replay ask how exact the engine was.
first = next(entry for entry in entries if entry.lane == "plain")
entries[entries.index(first)] = replace(first, event=replace(first.event, token=replace(first.event.token, id=1)))
assert playable(header, entries)["end"]["exactness"]["mark"] == "differs"
"""
WITHOUT_TORCH = {
    "help": "from specdemo.cli.main import app; app(['--help'], standalone_mode=False)",
    "help of a group": "from specdemo.cli.main import app; app(['lab', '--help'], standalone_mode=False)",
    "presets": "from specdemo.cli.main import app; app(['presets'], standalone_mode=False)",
    "table of a bench": "import tools.bench.results",
    "specdemo itself": "import specdemo; assert not {'gradio', 'numpy', 'typer'} & {*sys.modules}",
    "a race from Python": "from specdemo import race; assert 'gradio' not in sys.modules",
    "reading presets": "from specdemo.models.presets import load_presets; assert load_presets()[0]",
    "drafters and forms": "import specdemo.drafters.names, specdemo.racing.request, specdemo.ui.lab.draw",
    "replay": REPLAY,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_model_imports_no_torch(name: str) -> None:
    script = f"import sys\nfrom dataclasses import replace\n{WITHOUT_TORCH[name]}\nprint('END', *sys.modules)"
    command = [sys.executable, "-c", script, str(RECORDING)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers"} & set(done.stdout.rpartition("END")[2].split())


def test_what_loads_a_known_model_imports_none_of_transformers_own() -> None:
    """They take half of a start, so they are imported where a function needs them."""
    script = "import sys, specdemo.models.loaded; assert 'transformers.modeling_utils' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120, check=True)


ELSEWHERE = """
import importlib, mmap, os, pkgutil, platform, sys
from pathlib import Path
from types import SimpleNamespace
system, name, missing = sys.argv[1], sys.argv[2], sys.argv[3:]
TRITON = [f"specdemo.engines.gpu.{name}" for name in ("kernels", "noise", "products", "routing", "trees")]
# Other people's libraries come first: they believe the interpreter, which is Linux's.
import accelerate, fastapi, gguf, gradio, numpy, psutil, safetensors, scipy.special, torch, tqdm, transformers, typer
from transformers import LlamaConfig, LlamaForCausalLM
assert not [module for module in sys.modules if module.partition(".")[0] == "specdemo"]
sys.platform, platform.system, os.environ["PATH"] = name, lambda: system, ""
sys.modules.update(dict.fromkeys(["triton", *missing]))
for lacks, what in ((os, "sched_getaffinity"), (mmap, "MADV_HUGEPAGE")):
    delattr(lacks, what)
if system == "Darwin":
    torch.ops.mkldnn = SimpleNamespace()
    torch.backends.mkldnn.is_available = lambda: False
    torch.cpu.get_capabilities = lambda: {"neon": True}
import specdemo
from specdemo.system import hardware
hardware.CPU_INFO = hardware.CGROUP = Path("/nowhere")
hardware.find_spec = lambda name: None
if system == "Darwin":
    hardware.quantized_engine = lambda: "qnnpack"
failed = []
for module in pkgutil.walk_packages(specdemo.__path__, "specdemo."):
    if module.name not in ("specdemo.__main__", *TRITON):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed.append((module.name, repr(error)))
assert not failed, failed
from specdemo.decoding.batch import decode
from specdemo.decoding.loop import Decoding
from specdemo.drafters.prompt_lookup import PromptLookup
from specdemo.engines.choose import runner_maker
from specdemo.racing.race import rule_for
from specdemo.settings import Settings
dtype = hardware.choose_dtype("auto", hardware.choose_device("auto"))
sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
# Its output layer is large enough to be packed, where oneDNN is.
model = LlamaForCausalLM(LlamaConfig(vocab_size=8200, initializer_range=0.25, **sizes)).eval()
texts = []
for eager in (False, True):
    engine, make = runner_maker(model, eager=eager, dtype=dtype)
    rule = rule_for(Settings(k=4, max_new_tokens=24))
    events = decode(Decoding(make(40), PromptLookup(), [3, 4, 5, 3, 4, 5, 3, 4], rule))
    texts.append([token.id for event in events for token in getattr(event, "emitted", ())])
    print(engine)
print(str(dtype).removeprefix("torch."), len(texts[0]) > 15)
"""
SYSTEMS = {  # what `platform.system` and `sys.platform` say, modules of Python that are not there, the dtypes there are
    "Mac": ("Darwin", "darwin", [], {"float32"}),
    "Windows": (
        *("Windows", "win32", ["fcntl", "grp", "posix", "pwd", "resource", "termios"]),
        {"float32", "float16", "bfloat16"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_everything_is_imported_and_a_model_runs_on_another_system(system: str) -> None:
    """By fakes, in a process of its own: what Python says of the system, what it lacks there (modules, Triton, huge
    pages, `sched_getaffinity`), no compiler, no files of Linux that tell of the CPU; and for the Mac what a
    torch without oneDNN and FBGEMM says and has. The libraries that are imported, and paths, remain Linux's."""
    name, short, missing, dtypes = SYSTEMS[system]
    command = [sys.executable, "-c", ELSEWHERE, name, short, *missing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    fast, eager, dtype, written = done.stdout.split()
    assert (fast, eager, written) == ("fused", "eager", "True")
    assert dtype in dtypes


def test_nothing_that_another_package_has_is_replaced() -> None:
    """No attribute of what a file imports from elsewhere is set."""
    for path in (ROOT / "specdemo").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        theirs = set[str]()
        for node in nodes:
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
                theirs |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                assert ast.unparse(node).partition(".")[0] not in theirs, f"{path}:{node.lineno}"
