"""The recurrent layers' part of gpu_mixers.py."""

from collections.abc import Callable

import torch
from gpu_mixers_common import EPS, EXACT_WINDOWS, ROWS, WIDE_ROWS, Bench, Model, error, same

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.conv import commit_conv, conv
from sparkinfer.kernels.conv import triton_impl as conv_impl
from sparkinfer.kernels.delta_net import DeltaNet, delta_net
from sparkinfer.kernels.delta_net import triton_impl as net_impl
from sparkinfer.kernels.gated_delta import DeltaInputs, commit_delta, gated_delta
from sparkinfer.kernels.gated_delta import triton_impl as delta
from sparkinfer.kernels.gated_delta import triton_wide as delta_wide
from sparkinfer.kernels.gated_norm import gated_norm


class RecurrentCase:
    """States and records of every recurrent layer, and a window of rows."""

    def __init__(self, bench: Bench, model: Model) -> None:
        self.bench, self.model, self.shape = bench, model, model.recurrent
        s, rows = self.shape, WIDE_ROWS[-1]

        def made(*sizes: int) -> torch.Tensor:
            return 0.1 * torch.randn(sizes, generator=bench.generator, device="cuda")

        self.conv, self.delta = made(s.layers, 3, s.channels), made(s.layers, 32, 128, 128)
        self.records = {
            "conv_record": made(s.layers, 16, s.channels), "key_record": made(s.layers, 16, 2048),
            "delta_record": made(s.layers, 16, 4096), "decay_record": made(s.layers, 16, 32),
        }  # fmt: skip
        self.params = bench.params(
            conv=self.conv.data_ptr(), recurrent=self.delta.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self.records.items()},
        )  # fmt: skip
        self.x, self.weight = bench.random(rows, s.channels), bench.random(4, s.channels, 0.5)
        self.mixed, self.alpha, self.beta = (
            bench.random(rows, s.channels),
            bench.random(rows, 32),
            bench.random(rows, 32),
        )
        self.rate, self.bias = bench.random(1, 32), bench.random(1, 32)
        self.rate.array.copy_(-self.rate.array.abs() - 0.01)
        self.out, self.gate, self.norm = (
            bench.random(rows, 4096),
            bench.random(rows, 4096),
            bench.random(1, 128),
        )
        self.normed = bench.backend.activation(rows, 4096, quantised=True)

    def inputs(self, first: int, rows: int) -> DeltaInputs:
        parts = [b.part(first, rows) for b in (self.mixed, self.alpha, self.beta)]
        return DeltaInputs(*parts, self.rate, self.bias)

    def record_conv(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        for layer in range(layers):
            conv(recorder, self.x.part(first, rows), self.weight, self.shape, layer, self.params,
                 self.mixed.part(first, rows))  # fmt: skip
        return recorder

    def record_delta(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        for layer in range(layers):
            gated_delta(recorder, self.inputs(first, rows), self.shape, layer, self.params,
                        self.out.part(first, rows), EPS)  # fmt: skip
        return recorder

    def record_net(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        x, gate, out = (b.part(first, rows) for b in (self.x, self.gate, self.out))
        normed = Activation(self.normed.f32.part(first, rows), self.normed.q8.part(first, rows))
        for layer in range(layers):
            net = DeltaNet(self.shape, layer, self.weight, self.norm, EPS)
            delta_net(recorder, net, x, self.inputs(first, rows), gate, self.params, out, normed)
        return recorder

    def record_norm(self, rows: int, layers: int, first: int = 0) -> CudaRecorder:
        recorder = self.bench.recorder(rows)
        for _ in range(layers):
            gated_norm(recorder, self.out, self.gate, self.norm, self.normed, heads=32, eps=EPS)
        return recorder

    def wanted_delta(self, rows: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 rows and state of layer 0 after `state`."""
        x = self.mixed.array[:rows].double()
        q, k, v = (
            x[:, :2048].view(rows, 16, 128),
            x[:, 2048:4096].view(rows, 16, 128),
            x[:, 4096:].view(rows, 32, 128),
        )
        q = q / (q.pow(2).sum(-1, keepdim=True) + EPS).sqrt() / 128**0.5
        k = k / (k.pow(2).sum(-1, keepdim=True) + EPS).sqrt()
        q, k = q.repeat(1, 2, 1), k.repeat(1, 2, 1)
        sums = self.alpha.array[:rows].double() + self.bias.array.double()
        decay = torch.exp(
            self.rate.array.double() * torch.nn.functional.softplus(sums, threshold=50)
        )
        gate, s, out = torch.sigmoid(self.beta.array[:rows].double()), state.double().clone(), []
        for r in range(rows):
            s *= decay[r, :, None, None]
            change = gate[r, :, None] * (v[r] - torch.einsum("hk,hkv->hv", k[r], s))
            s += k[r, :, :, None] * change[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[r], s))
        return torch.stack(out).view(rows, -1), s

    def delta_error(self, rows: int) -> float:
        """Of rows and state together, from the state as it stands."""
        wanted, after = self.wanted_delta(rows, self.delta[0])
        self.bench.set(self.params, advance=1)
        self.bench.run(self.record_delta(rows, 1))
        return max(error(self.out.array[:rows], wanted), error(self.delta[0], after))

    def exact(
        self, record: Callable[..., CudaRecorder], result: Buffer, state: torch.Tensor, rows: int
    ) -> bool:
        """Rows of a recorded window, and each advanced alone, have the same bits."""
        self.bench.set(self.params, advance=0)
        self.bench.run(record(rows, 1))
        window, before = result.array[:rows].clone(), state.clone()
        self.bench.set(self.params, advance=1)
        kept = []
        for row in range(rows):
            self.bench.run(record(1, 1, row))
            kept.append(state[0].clone())
        good = same(result.array[:rows], window)
        for count in (1, rows):
            state.copy_(before)
            self.bench.set(self.params, commit_rows=count)
            recorder = self.bench.recorder(1)
            commit_conv(recorder, self.shape, self.params)
            commit_delta(recorder, self.shape, self.params)
            self.bench.run(recorder)
            good = good and same(state[0], kept[count - 1])
        state.copy_(before)
        return good

    def few(self) -> None:
        layers, name = self.shape.layers, self.model.name
        for rows in ROWS:
            self.bench.set(self.params, advance=int(rows == 1), commit_rows=rows)
            for what, record, n_bytes in (
                (
                    "net",
                    self.record_net,
                    4 * 32 * 128 * 128 * (2 if rows == 1 else 1) + 4 * 24000 * rows,
                ),
                ("conv", self.record_conv, 4 * 8192 * (2 * rows + 4 + 6)),
                (
                    "delta",
                    self.record_delta,
                    4 * 32 * 128 * 128 * (2 if rows == 1 else 1) + 4 * 12288 * rows,
                ),
                ("norm", self.record_norm, 4 * 4096 * 3 * rows + 5120 * rows),
            ):
                self.bench.report(
                    f"{what} {name} rows {rows}",
                    self.bench.time(record(rows, layers)) / layers,
                    n_bytes,
                )
            recorder = self.bench.recorder(1)
            commit_conv(recorder, self.shape, self.params)
            commit_delta(recorder, self.shape, self.params)
            moved = self.shape.state_bytes * 2 + self.shape.record_bytes * rows // 16
            self.bench.report(
                f"commit {name} rows {rows} (all layers)", self.bench.time(recorder), moved
            )
        print(f"delta {name}: error of 16 rows {self.delta_error(16):.1e}", flush=True)
        self.delta.mul_(0.1)
        for rows in EXACT_WINDOWS:
            found = (
                self.exact(self.record_conv, self.mixed, self.conv, rows),
                self.exact(self.record_delta, self.out, self.delta, rows),
                self.exact(self.record_net, self.normed.f32, self.delta, rows),
            )
            print(
                f"conv, delta, net {name}: rows exact, commit exact for {rows} rows: {found}",
                flush=True,
            )

    def many(self) -> None:
        name = self.model.name
        self.bench.set(self.params, advance=1)
        for rows in WIDE_ROWS:
            for what, record, n_bytes in (
                ("conv", self.record_conv, 4 * 8192 * 2 * rows),
                ("delta", self.record_delta, 4 * 12288 * rows),
                ("norm", self.record_norm, 4 * 4096 * 3 * rows + 5120 * rows),
            ):
                seconds = self.bench.time(record(rows, 3), 5) / 3
                note = f"{1e9 * seconds / rows:.0f} ns a row"
                if what == "delta":
                    note += f" ({self.bench.parts(record(rows, 3), 3)})"
                    self.delta.mul_(0.1)
                    note += f", error {self.delta_error(rows):.1e}"
                self.bench.report(f"{what} {name} rows {rows}", seconds, n_bytes, note)

    def sweep(self) -> None:
        before = delta.COLUMNS, delta.WARPS
        for choice in ((8, 1), (16, 1), (32, 1), (32, 2), (32, 4), (64, 4)):
            delta.COLUMNS, delta.WARPS = choice
            for rows in (1, 6):
                self.bench.set(self.params, advance=int(rows == 1))
                seconds = (
                    self.bench.time(self.record_delta(rows, self.shape.layers)) / self.shape.layers
                )
                self.bench.report(
                    f"delta rows {rows} columns, warps {choice}",
                    seconds,
                    2**21 * (2 if rows == 1 else 1),
                )
        net_before = net_impl.WARPS
        for choice in (1, 2, 4):
            net_impl.WARPS = choice
            for rows in (1, 6):
                self.bench.set(self.params, advance=int(rows == 1))
                seconds = (
                    self.bench.time(self.record_net(rows, self.shape.layers)) / self.shape.layers
                )
                self.bench.report(
                    f"net rows {rows} warps {choice}",
                    seconds,
                    2**21 * (2 if rows == 1 else 1),
                )
        net_impl.WARPS = net_before
        delta.COLUMNS, delta.WARPS = before
        self.bench.set(self.params, advance=1)
        wide_before = (
            delta_wide.COLUMNS,
            delta_wide.RESULT_COLUMNS,
            delta_wide.SCAN_WARPS,
            delta_wide.SCAN_STAGES,
        )
        for choice in ((32, 128, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2), (32, 128, 4, 3)):
            (
                delta_wide.COLUMNS,
                delta_wide.RESULT_COLUMNS,
                delta_wide.SCAN_WARPS,
                delta_wide.SCAN_STAGES,
            ) = choice
            try:
                seconds = self.bench.time(self.record_delta(2048, 1), 5)
            except (
                Exception
            ) as failure:  # a variant that does not fit the chip is a result of the sweep
                print(f"delta {choice}: {type(failure).__name__} {str(failure)[:80]}", flush=True)
                continue
            self.delta.mul_(0.1)
            note = f"{1e9 * seconds / 2048:.0f} ns a row, error {self.delta_error(2048):.1e}"
            self.bench.report(
                f"delta rows 2048 columns of scan and results, scan's warps, stages {choice}",
                seconds,
                0,
                note,
            )
        (
            delta_wide.COLUMNS,
            delta_wide.RESULT_COLUMNS,
            delta_wide.SCAN_WARPS,
            delta_wide.SCAN_STAGES,
        ) = wide_before
        conv_before = conv_impl.CHANNELS
        for channels in (32, 64, 128, 256):
            conv_impl.CHANNELS = channels
            seconds = self.bench.time(self.record_conv(1, self.shape.layers)) / self.shape.layers
            self.bench.report(f"conv rows 1 channels {channels}", seconds, 4 * 8192 * 12)
        conv_impl.CHANNELS = conv_before
