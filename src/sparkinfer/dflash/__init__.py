"""Speculative decoding with a block-diffusion draft: propose, verify, accept, commit, and the planner that picks the width."""
