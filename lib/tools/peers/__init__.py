"""PyTorch's own data parallelism and sharding behind our interfaces, to be measured beside ours:
`--ddp_wrapper torch_ddp` and `fsdp2`, and `--sharded_optimizer torch_zero`.
"""
