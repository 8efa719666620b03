"""The int64 words that change from one replay to the next. A tape holds the block's address, never a sequence's."""

POSITION = 0  # tokens before the first row
ADVANCE = (
    8  # 1: recurrent and convolution state are updated in place; 0: rows are recorded for `commit`
)
KEYS = 16  # address of the key cache: [attention layer][kv head][position / 16][head size][16]
VALUES = 24  # address of the value cache: [attention layer][kv head][position][head size]
HEAD_BYTES = 32  # bytes of one (layer, kv head) plane of either cache
CONV = 40  # address of the convolution states: [recurrent layer][taps - 1][channels]
RECURRENT = 48  # address of the delta-rule states: [recurrent layer][value head][head size / 16][head size][16]
CONV_RECORD = 56  # address of recorded convolution inputs: [recurrent layer][row][channels]
KEY_RECORD = 64  # [recurrent layer][row][key heads x head size]
DELTA_RECORD = 72  # [recurrent layer][row][value heads x head size]
DECAY_RECORD = 80  # [recurrent layer][row][value heads]
ATTENTION_CHUNKS = 88  # chunks of every attention phase of this replay
COMMIT_ROWS = 96  # recorded rows that `commit` applies
FIRST = 104  # cache rows below this one are missing: no attention sees them
WINDOW_CHUNKS = 112  # chunks of every attention phase with a sliding window
ROTATION = 120  # added to the position of a cache row for its rotation: a cache may begin later than its sequence
CONV_NEXT = 128  # where a run of few rows leaves the convolution states it has brought forward (CONV: in place)
RECURRENT_NEXT = 136  # the same of the delta-rule states
SERIAL = 144  # number of this replay, for what it leaves for the host
WORDS = 20
