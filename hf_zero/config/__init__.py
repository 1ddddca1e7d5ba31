"""What the user asked for: `ZeroConfig`, how its values are read, and what DeepSpeed's keys become.

Only this folder reads `HF_ZERO_*` variables, and only `zero_config` knows stage numbers: everything else asks a policy
("are parameters sharded?"). Nothing here imports torch, so that the command line starts quickly.

- `zero_config`: the configuration, and the policy of a stage.
- `values`: numbers, sizes and booleans as people write them.
- `deepspeed`: translates a DeepSpeed JSON file; `deepspeed_rules`: its table of keys.
"""
