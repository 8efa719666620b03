"""Training of DFlash drafts. The only area besides the CUDA backend that needs torch; nothing imports it at start.

A run has four parts: the target writes conversations (`generate`), the draft learns to propose the target's next tokens
from the target's hidden states (`trainer`), acceptance is measured on prompts it has not seen (`evaluate`), and the
result is written in the two layouts that drafts come in (`export`). `pipeline` joins them.
"""
