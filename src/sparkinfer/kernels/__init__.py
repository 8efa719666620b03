"""One folder per op: the contract in `__init__`, the numpy specification in `reference`, fast forms beside it."""
