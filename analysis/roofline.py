"""The roofline beside published decoding speeds: predicted and published tokens per second, and the error.

    python analysis/roofline.py

Source of the speeds: the two READMEs of pytorch-labs/gpt-fast, dense and mixtral-moe (A100-80GB limited to 330 W; one
die of an MI250X), batch 1, short prompt. The first two rows set the overheads of :mod:`asdsim.evaluate.roofline`; the
others check them.
"""

from __future__ import annotations

from asdsim.evaluate.roofline import DEVICES, Roofline, Size, size_of

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
