"""Compiles the token mixers at real shapes for an H200 and prints [kernel, resources] pairs as one line of JSON."""

import json

import torch
from compile_sm90 import activation, buffer, compile_all, recorder

from sparkinfer.kernels.argmax import argmax, argmax_words
from sparkinfer.kernels.attention import triton_impl as split
from sparkinfer.kernels.attention.triton_wide import record_wide
from sparkinfer.kernels.block_conv import BlockConv, block_conv, block_conv_add
from sparkinfer.kernels.conv import commit_conv, conv
from sparkinfer.kernels.copy_rows import copy_rows
from sparkinfer.kernels.delta_net import DeltaNet, delta_net
from sparkinfer.kernels.exchange_rows import exchange_rows
from sparkinfer.kernels.gated_delta import DeltaInputs, commit_delta, gated_delta
from sparkinfer.kernels.gated_norm import gated_norm
from sparkinfer.kernels.greedy_chain import TokenLinks, TokenPicks, greedy_chain
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.rope import cache_rows, rope
from sparkinfer.kernels.shapes import Heads, RecurrentShape

GDN = RecurrentShape(30, 8192, 4, 16, 32, 128, 16)
CONTEXT = 131072


def heads(kv_heads, size=256, gated=True, causal=True, window=0):
    return Heads(0, 16, kv_heads, size, size // 4, False, gated, 1e-6, causal, window)


def attention_cases():
    """One launch list a case: (rows, shape, format of the cache)."""
    params = buffer(1, 16, torch.int64)
    for rows, shape, cache_format in (
        (1, heads(2), "f16"),
        (6, heads(2), "f16"),
        (1, heads(4), "f16"),
        (2, heads(8, 64, gated=False), "f16"),
        (2, heads(8, 48, gated=False), "f16"),
        (6, heads(4, 128, gated=False, causal=False, window=4096), "f16"),
        (1, heads(2), "q8_0"),
        (6, heads(2), "q8_0"),
        (1, heads(4, 128, gated=False), "q8_0"),
        (6, heads(4, 128, gated=False, causal=False, window=4096), "q8_0"),
        (2, heads(8, 64, gated=False), "q8_0"),
        (2, heads(8, 32, gated=False), "q8_0"),
    ):
        run, width = recorder(rows, cache_format=cache_format), 16 * shape.head_size
        gate = buffer(16, 2 * width) if shape.gated else None
        split.record(
            run, buffer(16, width), shape, params, gate, activation(16, width), CONTEXT, 0, rows
        )
        yield run
    for cache_format in ("f16", "q8_0"):
        run = recorder(2048, cache_format=cache_format)
        gate, out = buffer(2048, 8192), activation(2048, 4096, quantised=False)
        record_wide(run, buffer(2048, 4096), heads(2), params, gate, out, CONTEXT, 0, 2048)
        yield run
        run = recorder(6, cache_format=cache_format)
        q, kv, table = buffer(16, 8192), buffer(16, 512), buffer(CONTEXT, 128)
        norm = buffer(1, 256)
        rope(run, q, kv, kv, heads(2), table, params, buffer(16, 4096), norm, norm)
        cache_rows(run, kv, kv, heads(2), table, params, norm)
        yield run


def recurrent_cases():
    params = buffer(1, 16, torch.int64)
    for rows in (1, 2048):
        run, n = recorder(rows), max(rows, 16)
        gates = [buffer(n, 32), buffer(n, 32), buffer(1, 32), buffer(1, 32)]
        conv(run, buffer(n, 8192), buffer(4, 8192), GDN, 1, params, buffer(n, 8192))
        gated_delta(
            run, DeltaInputs(buffer(n, 8192), *gates), GDN, 1, params, buffer(n, 4096), 1e-6
        )
        gated_norm(
            run,
            buffer(n, 4096),
            buffer(n, 4096),
            buffer(1, 128),
            activation(n, 4096),
            heads=32,
            eps=1e-6,
        )
        yield run
    for rows in (1, 6):
        run = recorder(rows)
        gates = [buffer(16, 32), buffer(16, 32), buffer(1, 32), buffer(1, 32)]
        net, wide = DeltaNet(GDN, 1, buffer(4, 8192), buffer(1, 128), 1e-6), buffer(16, 8192)
        inputs, out = DeltaInputs(wide, *gates), activation(16, 4096)
        delta_net(run, net, wide, inputs, buffer(16, 4096), params, buffer(16, 4096), out)
        commit_conv(run, GDN, params)
        commit_delta(run, GDN, params)
        yield run


def other_cases():
    run = recorder(6)
    convolution = BlockConv(4, 64, buffer(8, 2048))
    block_conv(run, buffer(16, 2048), buffer(16, 256), convolution, activation(16, 2048))
    block_conv_add(run, buffer(16, 2048), buffer(16, 256), convolution, buffer(16, 2048))
    copy_rows(run, buffer(16, 2048), buffer(16, 2048))
    argmax(run, buffer(16, 248320), buffer(16, 2, torch.int64), 248320)
    yield run
    run, words = recorder(1), buffer(1, 40, torch.int64)
    argmax_words(run, buffer(1, 248320), buffer(1, 1, torch.int64), 248320, words, first=20)
    yield run
    run = recorder(2)
    words = buffer(1, 40, torch.int64)
    after = TritonWeight("F16", 4608, 64, torch.empty(4608 * 32, dtype=torch.int32))
    links = TokenLinks(buffer(49152, 64), after, (words, 16))
    picks = TokenPicks(buffer(16, 2, torch.int64), buffer(1, 4608, torch.int64), (words, 17))
    greedy_chain(run, buffer(16, 4608), 4608, links, picks)
    greedy_chain(run, buffer(16, 248320), 248320, None, TokenPicks(buffer(16, 2, torch.int64)))
    exchange_rows(run, buffer(1, 1025, torch.int64), 512, [(after, after)])
    yield run


if __name__ == "__main__":
    found = []
    for cases in (attention_cases(), recurrent_cases(), other_cases()):
        for run in cases:
            found += [(name, resources) for name, resources, _ in compile_all(run)]
    print(json.dumps(found))
