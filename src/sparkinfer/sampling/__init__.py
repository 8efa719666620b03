"""Sampling: a row of logits and the tokens before it, to a distribution, to a token."""

from sparkinfer.sampling.distribution import Distribution, adjust, distribution
from sparkinfer.sampling.history import TokenHistory
from sparkinfer.sampling.params import RANGES, SamplingParams
from sparkinfer.sampling.randomness import ACCEPT_STREAM, DRAFT_STREAM, TARGET_STREAM, uniform
from sparkinfer.sampling.sampler import Choice, Sampler, TokenLogprob

__all__ = [
    "ACCEPT_STREAM",
    "DRAFT_STREAM",
    "RANGES",
    "TARGET_STREAM",
    "Choice",
    "Distribution",
    "Sampler",
    "SamplingParams",
    "TokenHistory",
    "TokenLogprob",
    "adjust",
    "distribution",
    "uniform",
]
