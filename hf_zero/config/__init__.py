"""What the user asked for: `ZeroConfig`, how its values are read, and what DeepSpeed's keys become.

Only this folder reads `HF_ZERO_*` variables and knows stage numbers: everything else asks a policy ("are parameters
sharded?"). Nothing here imports torch, so that the command line starts quickly.

- `zero_config`: the configuration. `stages`: the policy of a stage. `files`: where it is written.
- `values`: numbers, sizes and booleans as people write them.
- `deepspeed`: translates a DeepSpeed JSON file (`deepspeed_training`: what it says about training); `deepspeed_rules`: its
  table of keys; `deepspeed_reader`: one pass over it.
"""
