"""PyTorch's own sharding behind our interfaces, to be measured beside ours: `--ddp_wrapper fsdp2`
and `--sharded_optimizer torch_zero`.
"""
