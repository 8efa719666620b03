"""Correctness before speed: is speculation lossless, are both sides the same model, is the output worth anything?

Everything comes from public calls: greedy answers with log-probabilities, plain and with drafts, and the
log-probabilities after every prefix of the base's answers (teacher forcing), which stay comparable after the first
token that differs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkinfer.evaluation.process import Run
from sparkinfer.evaluation.record import Bars, Correctness, Side

TOP = 5  # alternatives asked for with an answer
TAUGHT_TOP = 20  # and with teacher forcing: the most that a request may ask for
TAUGHT = 24  # first tokens of each answer that are taught
TIE_CAP = 0.05  # nats between the best two tokens, above which a difference is never a near-tie
_SAMPLED = {"temperature": 0.8, "seed": 20240229}
_REPEATED, _REPEATED_MORE = (
    0.5,
    0.2,
)  # share of 4-grams seen before: the bar, and more than the base by
_DISTINCT = 0.5  # least share of the base's distinct bigrams

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a cell: its tokens, or, before they are known, the text they are the first `length` tokens of."""

    cell: str
    number: int
    prompt: tuple[int, ...] | None = None
    text: str = ""  # the order that encodes it
    place: int = 0  # among that order's texts
    length: int | None = None

    def key(self, way: str) -> str:
        return f"{self.cell}/{self.number}/{way}"

    def order(self) -> dict[str, Any]:
        """Return the part of an order that names the prompt."""
        if self.prompt is None:
            return {"prompt_of": [self.text, self.place, self.length]}
        return {"prompt": list(self.prompt)}


def answer_orders(
    questions: Sequence[Question], tokens: int, *, drafting: bool, sampled: bool
) -> list[dict[str, Any]]:
    """Return the requests whose answers are compared; `sampled`: the first of each cell with a temperature, too."""
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "logprobs": TOP}
    orders = []
    for question in questions:
        orders.append(_order(question, "plain", greedy, speculate=False))
        if drafting:
            orders.append(_order(question, "draft", greedy, speculate=True))
        if drafting and sampled and question.number == 0:
            drawn = {**greedy, **_SAMPLED}
            orders.append(_order(question, "plain, sampled", drawn, speculate=False))
            orders.append(_order(question, "draft, sampled", drawn, speculate=True))
    return orders


def _order(
    question: Question, way: str, options: Mapping[str, Any], *, speculate: bool
) -> dict[str, Any]:
    return {
        "kind": "request",
        "id": question.key(way),
        **question.order(),
        "options": {**options, "speculate": speculate, "reuse_prefix": False},
    }


def teach_orders(questions: Sequence[Question], base: Run | None = None) -> list[dict[str, Any]]:
    """Return the orders that ask for log-probabilities along the base's plain answers.

    `base` None is for the base itself: along what it has answered before in the same process.
    """
    orders = []
    for question in questions:
        key = question.key("plain")
        order: dict[str, Any] = {
            "kind": "teach",
            "id": question.key("taught"),
            **question.order(),
            "count": TAUGHT,
            "options": {"temperature": 0.0, "logprobs": TAUGHT_TOP, "speculate": False},
        }
        order |= {"answer_of": key} if base is None else {"answer": base.results[key]["tokens"]}
        orders.append(order)
    return orders


def check_lossless(
    questions: Sequence[Question], run: Run, side: Side, bars: Bars
) -> list[Correctness]:
    """Compare answers with drafts to plain ones: tokens, log-probabilities, text and end, cell by cell."""
    found = []
    for cell, mine in _by_cell(questions).items():
        equal = compared = 0
        same = prompts = 0
        first = ""
        for question in mine:
            for ways in (("plain", "draft"), ("plain, sampled", "draft, sampled")):
                keys = [question.key(way) for way in ways]
                if not all(key in run.results for key in keys):
                    continue
                plain, draft = (run.results[key] for key in keys)
                place = first_difference(plain["tokens"], draft["tokens"])
                length = max(len(plain["tokens"]), len(draft["tokens"]))
                equal += length if place is None else place
                compared += length
                prompts += 1
                what = _differing_part(plain, draft)
                same += not what
                first = first or (f"{keys[1]}: {what}" if what else "")
        share = equal / compared if compared else 0.0
        passed = compared > 0 and share >= bars.agree and (same == prompts or bars.agree < 1)
        detail = f"{same}/{prompts} answers, {equal}/{compared} tokens" + (
            f"; {first}" if first else ""
        )
        numbers = {"agree": share, "answers": float(prompts), "tokens": float(compared)}
        found.append(Correctness("spec_agree", cell, side, passed, detail, numbers))
    return found


def _differing_part(plain: Answer, draft: Answer) -> str:
    """Return what differs first in two answers that should be one, "" if nothing does."""
    place = first_difference(plain["tokens"], draft["tokens"])
    if place is not None:
        return f"token {place} differs"
    for part in ("logprobs", "text", "finish"):
        if plain[part] != draft[part]:
            return f"{part} differ"
    return ""


def check_same_model(
    questions: Sequence[Question], base: Run, candidate: Run, bars: Bars
) -> list[Correctness]:
    """Compare the candidate with the base: log-probabilities along the base's answers, and its own answers.

    Answers may part at a near-tie: the base's two tokens are closer than the sides' log-probabilities differ anyway.
    """
    found = []
    for cell, mine in _by_cell(questions).items():
        rows = [
            pair
            for question in mine
            for pair in zip(
                *(run.results[question.key("taught")]["rows"] for run in (base, candidate)),
                strict=True,
            )
        ]
        numbers = compare_rows(rows)
        passed = bool(rows) and numbers["top1"] >= bars.top1 and numbers["kl"] <= bars.kl
        detail = f"top-1 {numbers['top1']:.4f}, KL {numbers['kl']:.2g} over {len(rows)} positions"
        found.append(Correctness("logits", cell, "candidate", passed, detail, numbers))
        found.append(_same_tokens(cell, mine, base, candidate, numbers["largest"]))
    return found


def compare_rows(rows: Sequence[tuple[Any, Any]]) -> dict[str, float]:
    """Return top1 (share of equal best tokens), mean kl (nats, candidate from base) and the largest difference.

    The divergence is over the base's best tokens and one bucket for all others. A token that the candidate does not
    list has at most its smallest listed probability; that is what counts for it.
    """
    agree = 0
    total = largest = 0.0
    for (_, _, base), (_, _, candidate) in rows:
        given = dict(map(tuple, candidate))
        least = min(given.values())
        agree += base[0][0] == candidate[0][0] or _tied(base, candidate[0][0])
        p = [math.exp(value) for _, value in base]
        q = [math.exp(given.get(token, least)) for token, _ in base]
        rest = max(1e-12, 1 - sum(p)), max(1e-12, 1 - sum(q))
        total += sum(a * math.log(a / max(b, 1e-300)) for a, b in zip(p, q, strict=True) if a > 0)
        total += rest[0] * math.log(rest[0] / rest[1])
        for token, value in base[:TOP]:
            largest = max(largest, abs(value - given.get(token, least)))
    count = len(rows)
    if not count:
        return {"top1": 0.0, "kl": 0.0, "largest": 0.0, "positions": 0.0}
    kl = max(0.0, total / count)
    return {"top1": agree / count, "kl": kl, "largest": largest, "positions": float(count)}


def _tied(base: Sequence[Sequence[Any]], token: int) -> bool:
    """Whether the base itself holds `token` for exactly as likely as its best."""
    return any(other == token and value == base[0][1] for other, value in base)


def _same_tokens(
    cell: str, questions: Sequence[Question], base: Run, candidate: Run, noise: float
) -> Correctness:
    equal = explained = 0
    worst = ""
    for question in questions:
        key = question.key("plain")
        first, second = base.results[key], candidate.results[key]
        place = first_difference(first["tokens"], second["tokens"])
        if place is None and first["finish"] == second["finish"]:
            equal += 1
            continue
        gap = _gap(first, second, place)
        if gap is not None and gap <= min(TIE_CAP, 2 * noise):
            explained += 1
        else:
            far = "not among the base's best" if gap is None else f"{gap:.3g} nats apart"
            worst = worst or f"{key}: token {place} differs, {far}"
    passed = equal + explained == len(questions)
    detail = f"{equal}/{len(questions)} answers are the base's, {explained} part at a near-tie"
    numbers = {
        "equal": float(equal),
        "explained": float(explained),
        "answers": float(len(questions)),
    }
    return Correctness(
        "same_tokens", cell, "candidate", passed, "; ".join(filter(None, (detail, worst))), numbers
    )


def _gap(base: Answer, candidate: Answer, place: int | None) -> float | None:
    """Return how much likelier the base holds its own token than the candidate's, None where it does not say."""
    both = min(len(base["tokens"]), len(candidate["tokens"]))
    if place is None or place >= both:
        return None
    _, own, top = base["logprobs"][place]
    listed: dict[int, float] = dict(top)
    other = listed.get(candidate["tokens"][place])
    return None if other is None else max(0.0, own - other)


def check_content(
    questions: Sequence[Question], run: Run, base: Run, side: Side
) -> list[Correctness]:
    """Refuse output that has become worthless: a loop is the fastest thing there is.

    The base's own repetition is allowed for: small models do repeat themselves.
    """
    found = []
    for cell, mine in _by_cell(questions).items():
        own = [run.results[question.key("plain")] for question in mine]
        reference = [base.results[question.key("plain")] for question in mine]
        numbers, allowed = content(own), content(reference)
        empty = any(not answer["tokens"] for answer in own)
        looping = numbers["repetition"] > max(_REPEATED, allowed["repetition"] + _REPEATED_MORE)
        narrow = numbers["distinct2"] < _DISTINCT * allowed["distinct2"]
        endless = allowed["eos"] >= 0.5 and numbers["eos"] == 0.0
        reasons = [
            text
            for wrong, text in (
                (empty, "an empty answer"),
                (looping, "it repeats itself"),
                (narrow, "it has few different word pairs"),
                (endless, "no answer ends"),
            )
            if wrong
        ]
        detail = (
            f"repetition {numbers['repetition']:.2f}, distinct pairs {numbers['distinct2']:.2f},"
            f" {numbers['eos']:.0%} end by themselves"
        )
        detail += f"; {' and '.join(reasons)} (base {allowed['repetition']:.2f})" if reasons else ""
        found.append(Correctness("content", cell, side, not reasons, detail, numbers))
    return found


def content(answers: Sequence[Answer]) -> dict[str, float]:
    """Return repetition (share of 4-grams seen before in an answer), distinct2 (different bigrams over bigrams), eos.

    Means over the answers; an answer too short for a 4-gram or a bigram repeats nothing.
    """
    repeated, distinct = [], []
    for answer in answers:
        fours, pairs = _grams(answer["tokens"], 4), _grams(answer["tokens"], 2)
        repeated.append(1 - len(set(fours)) / len(fours) if fours else 0.0)
        distinct.append(len(set(pairs)) / len(pairs) if pairs else 1.0)
    count = max(1, len(answers))
    ended = sum(answer["finish"] == "stop" for answer in answers)
    return {
        "repetition": sum(repeated) / count,
        "distinct2": sum(distinct) / count,
        "eos": ended / count,
        "tokens": float(sum(len(answer["tokens"]) for answer in answers)),
    }


def check_encoding(
    base: Sequence[Sequence[int]], candidate: Sequence[Sequence[int]]
) -> Correctness:
    """Compare the tokens of every prompt; both sides are then measured on the base's."""
    same = sum(list(a) == list(b) for a, b in zip(base, candidate, strict=True))
    detail = f"{same}/{len(base)} prompts have the base's tokens"
    numbers = {"equal": float(same), "prompts": float(len(base))}
    return Correctness("encoding", "all", "candidate", same == len(base), detail, numbers)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place at which two sequences differ, the shorter one's end included; None if they do not."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _grams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[place : place + size]) for place in range(len(tokens) - size + 1)]


def _by_cell(questions: Sequence[Question]) -> dict[str, list[Question]]:
    cells: dict[str, list[Question]] = {}
    for question in questions:
        cells.setdefault(question.cell, []).append(question)
    return cells
