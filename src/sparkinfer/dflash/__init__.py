"""Speculative decoding with a block-diffusion draft: propose, verify, accept, commit; a planner picks the width."""
