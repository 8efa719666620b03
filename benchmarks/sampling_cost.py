"""Microseconds of one choice by vocabulary and parameters: `python benchmarks/sampling_cost.py`."""

from time import process_time

import numpy as np

from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

CASES = {
    "greedy": SamplingParams(),
    "greedy, logprob": SamplingParams(logprobs=0),
    "greedy, 5 alternatives": SamplingParams(logprobs=5),
    "greedy, repetition penalty": SamplingParams(repetition_penalty=1.1),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 40": SamplingParams(temperature=0.8, top_k=40),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 40, top_p 0.95, min_p 0.05": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05
    ),
}


def logits(n_vocab: int) -> np.ndarray:
    """A row shaped like a language model's: a wide bulk and a few likely ids."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal(n_vocab) * 2.5
    row[rng.integers(0, n_vocab, 30)] += np.linspace(6, 16, 30)
    return row.astype(np.float32)


def microseconds(sampler: Sampler, row: np.ndarray, history: TokenHistory) -> float:
    """Processor time, the least of 9 rounds of 40 calls."""
    rounds = []
    for _ in range(9):
        started = process_time()
        for _ in range(40):
            sampler.choose(row, history)
        rounds.append((process_time() - started) / 40)
    return min(rounds) * 1e6


def main() -> None:
    history = TokenHistory(range(500))
    for token in range(400, 900):
        history.push(token)
    sizes = (49_152, 151_936)
    print(f"{'us per choice':36}" + "".join(f"{size:>10}" for size in sizes))
    for name, params in CASES.items():
        costs = [microseconds(Sampler(params, n, seed=1), logits(n), history) for n in sizes]
        print(f"{name:36}" + "".join(f"{cost:10.0f}" for cost in costs))


if __name__ == "__main__":
    main()
