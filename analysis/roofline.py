"""The roofline beside published decoding speeds and step times, and the error, as the tables of docs/load.md.

    python analysis/roofline.py

Source of the speeds over one token: the two READMEs of pytorch-labs/gpt-fast, dense and mixtral-moe (A100-80GB limited
to 330 W; one die of an MI250X), batch 1, short prompt. The first two rows set the overheads of
:mod:`asdsim.evaluate.roofline`; the others check them, and so do all times by batch and by width, whose sources stand
with them.
"""

from __future__ import annotations

from typing import NamedTuple

from asdsim.evaluate.roofline import DEVICES, Device, Roofline, Size, size_of

LLAMA2_7B = size_of(
    {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008,
     "vocab_size": 32000}, "Llama-2-7B",
)  # fmt: skip
LLAMA2_70B = size_of(
    {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
     "intermediate_size": 28672, "vocab_size": 32000}, "Llama-2-70B",
)  # fmt: skip
MIXTRAL = size_of(
    {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
     "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, "Mixtral-8x7B",
)  # fmt: skip
CONTEXT = 100.0

ROWS: list[tuple[str, str, Size, int, float, float, bool]] = [
    ("Llama-2-7B", "a100", LLAMA2_7B, 1, 16, 104.9, True),
    ("Llama-2-7B", "a100", LLAMA2_7B, 2, 16, 168.84, True),
    ("Llama-2-7B", "a100", LLAMA2_7B, 4, 16, 254.02, False),
    ("Llama-2-7B", "a100", LLAMA2_7B, 8, 16, 328.43, False),
    ("Llama-2-7B", "a100", LLAMA2_7B, 1, 8, 155.58, False),
    ("Llama-2-70B", "a100", LLAMA2_70B, 2, 16, 21.32, False),
    ("Llama-2-70B", "a100", LLAMA2_70B, 4, 16, 38.01, False),
    ("Llama-2-70B", "a100", LLAMA2_70B, 8, 16, 62.50, False),
    ("Llama-2-7B", "mi250x-gcd", LLAMA2_7B, 1, 16, 76.33, False),
    ("Mixtral-8x7B", "a100", MIXTRAL, 2, 16, 78.75, False),
    ("Mixtral-8x7B", "a100", MIXTRAL, 4, 16, 118.23, False),
    ("Mixtral-8x7B", "a100", MIXTRAL, 8, 16, 203.69, False),
]
"""Model, device, size, devices, bits of a weight, published tokens per second, whether the row set an assumption."""

LLAMA3_1B = size_of(
    {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
     "intermediate_size": 8192, "vocab_size": 128256}, "Llama-3.2-1B",
)  # fmt: skip
LLAMA3_8B = size_of(
    {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
     "intermediate_size": 14336, "vocab_size": 128256}, "Llama-3.1-8B",
)  # fmt: skip
LLAMA3_70B = size_of(
    {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
     "intermediate_size": 28672, "vocab_size": 128256}, "Llama-3-70B",
)  # fmt: skip
RTX3090 = Device(71.0, 936.2, "NVIDIA GA102 white paper, FP16 with FP32 accumulation, without sparsity")


class Published(NamedTuple):
    """A published step time.

    Attributes
    ----------
    source : str
    system, model : str
    device : Device
    size : Size
    tp : int
    bits : float
    batch, width : int
        Requests of a pass, and tokens of each.
    context : float
        Tokens that each request stands on, on average.
    ms : float
    """

    source: str
    system: str
    model: str
    device: Device
    size: Size
    tp: int
    bits: float
    batch: int
    width: int
    context: float
    ms: float

    @property
    def predicted(self) -> float:
        """Milliseconds by the roofline."""
        cost = Roofline(self.device, self.size, self.tp, self.bits, 16, "lookup", "published")
        return float(cost.pass_us(self.batch * self.width, self.batch * self.context, self.batch)) / 1e3

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was published."""
        return self.predicted / self.ms - 1


def _series(
    source: str, system: str, model: str, device: Device, size: Size, tp: int, bits: float, context: float,
    times: dict[tuple[int, int], float],
) -> list[Published]:  # fmt: skip
    """Return published times by (batch, width)."""
    return [
        Published(source, system, model, device, size, tp, bits, batch, width, context, ms)
        for (batch, width), ms in times.items()
    ]


def _rates(table: dict[int, float]) -> dict[tuple[int, int], float]:
    """Return milliseconds of a decoding step by (batch, 1) from tokens per second by batch."""
    return {(batch, 1): 1e3 * batch / rate for batch, rate in table.items()}


def _widths(table: dict[int, float]) -> dict[tuple[int, int], float]:
    """Return milliseconds of a pass by (1, width) from tokens per second by width."""
    return {(1, width): 1e3 * width / rate for width, rate in table.items()}


LMDEPLOY = "InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md, v0.1.0a1, prompt 128, 2,048 new tokens"
VLLM = "buildkite.com/vllm/performance-benchmark, build 9515: latency of 128 tokens after a prompt of 32, over 128"
BENCH = "yobitelcomm.github.io/bench, concurrency sweep: vLLM 0.21.0, median TPOT; context not stated, taken as 300"
NIM = "docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance: NIM 1.8.0, fp8, prompt 5,000, 500 new tokens, ITL"
STEPS: list[Published] = [
    *_series(LMDEPLOY, "LMDeploy, A100", "Llama-2-7B", DEVICES["a100"], LLAMA2_7B, 1, 16, 1152.0,
             _rates({1: 98.92, 16: 1010.62, 32: 1462.12, 64: 1852.06})),
    *_series(LMDEPLOY, "LMDeploy, 4 x A100", "Llama-2-70B", DEVICES["a100"], LLAMA2_70B, 4, 16, 1152.0,
             _rates({1: 32.38, 16: 482.99, 32: 853.56, 64: 1391.8})),
    *_series(VLLM, "vLLM, H200", "Llama-3.1-8B", DEVICES["h200"], LLAMA3_8B, 1, 16, 96.0, {(8, 1): 833.42 / 128}),
    *_series(VLLM, "vLLM, 4 x H200", "Llama-3-70B", DEVICES["h200"], LLAMA3_70B, 4, 16, 96.0, {(8, 1): 2077.53 / 128}),
    *_series(VLLM, "vLLM, 2 x H200", "Mixtral-8x7B", DEVICES["h200"], MIXTRAL, 2, 16, 96.0, {(8, 1): 1917.44 / 128}),
    *_series(BENCH, "vLLM, H100", "Llama-3.1-8B", DEVICES["h100"], LLAMA3_8B, 1, 16, 300.0,
             {(1, 1): 6.48, (4, 1): 6.59, (16, 1): 10.94}),
    *_series(NIM, "TensorRT-LLM, 2 x H100", "Llama-3.3-70B", DEVICES["h100"], LLAMA3_70B, 2, 8, 5250.0,
             {(1, 1): 18.58, (5, 1): 21.83}),
    *_series("ggml-org/llama.cpp pull request 24216, pp512 by microbatch", "llama.cpp, RTX 3090", "Llama-3.2-1B",
             RTX3090, LLAMA3_1B, 1, 16, 256.0,
             _widths({1: 379.20, 2: 682.74, 4: 1349.54, 8: 2602.11, 16: 4588.29, 32: 7671.32, 64: 12340.13})),
    *_series("ggml-org/llama.cpp pull requests 14262 (widths 1, 2; BF16) and 15131 (8, 16; F16), pp512 by microbatch",
             "llama.cpp, RTX 3090", "Llama-3.1-8B", RTX3090, LLAMA3_8B, 1, 16, 256.0,
             _widths({1: 58.27, 2: 109.70, 8: 423.63, 16: 764.17})),
]  # fmt: skip
"""Step times by batch and by width. None of them set an assumption. ITL and TPOT of servers hold the prompts of other
requests as well, so only small concurrencies of long prompts are here."""


def errors() -> list[tuple[str, float, float, float, bool]]:
    """Return name, predicted and published tokens per second, relative error, and whether the row set an assumption."""
    rows = []
    for model, device, size, tp, bits, published, used in ROWS:
        cost = Roofline(DEVICES[device], size, tp, bits, 16, "lookup", "published")
        predicted = 1e6 / float(cost.pass_us(1.0, CONTEXT))
        rows.append((f"{model}, {bits:g} bits, {tp} x {device}", predicted, published, predicted / published - 1, used))
    return rows


if __name__ == "__main__":
    print("| system | predicted tokens/s | published | error |\n|---|---|---|---|")
    for name, predicted, published, error, used in errors():
        print(f"| {name}{' (set from it)' if used else ''} | {predicted:.1f} | {published:g} | {error:+.1%} |")
    print("\n| system | model | batch | tokens of each | predicted ms | published ms | error |")
    print("|---|---|---|---|---|---|---|")
    for one in STEPS:
        print(f"| {one.system} | {one.model}, {one.bits:g} bits | {one.batch} | {one.width} | {one.predicted:.2f} "
              f"| {one.ms:.2f} | {one.error:+.0%} |")  # fmt: skip
