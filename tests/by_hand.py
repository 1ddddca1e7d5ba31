"""Cases of everyday tests that are run by hand (`-m slow`): what they show, their neighbours show in less time.

The everyday suite has to stay below twelve minutes on two cores, whatever is added.
"""

SLOW_CASES = {
    "checkpoint/test_commit.py::test_a_whole_checkpoint_is_found_after_death_at_every_change[first]",
    "checkpoint/test_commit.py::test_a_whole_checkpoint_is_found_after_death_at_every_change[later]",
    "checkpoint/test_commit.py::test_death_in_the_save_after_a_death_leaves_a_whole_checkpoint",
    "comm/test_ledger.py::test_bf16_gathers_two_bytes_an_element_and_reduces_two_or_four[3]",
    "comm/test_wire.py::test_second_copy_keeps_the_bits_and_gathers_within_the_host[native-exact]",
    "comm/test_wire.py::test_training_in_each_format_is_near_and_alike_on_all_ranks[2-pairwise]",
    "engine/parameters/test_balanced.py::test_training_is_that_of_one_process_on_four_ranks",
    "engine/backward/test_failures.py::test_ranks_that_call_other_units_name_each_other[skipped]",
    "engine/backward/test_failures.py::test_ranks_that_call_other_units_name_each_other[twice]",
    "engine/test_gathered_parameters.py::test_changes_are_written_back_on_three_ranks",
    "engine/test_property.py::test_engine_agrees_with_unsharded_model_on_random_schedules[4-[2000,2001,3000,3001,2006,40339,2221,2394]]",
    "integrations/test_launch.py::test_an_accelerator_that_would_train_without_zero_is_refused",
    "integrations/trainer/test_checkpoint.py::test_state_goes_to_a_disk_and_comes_back_on_other_ranks",
    "integrations/trainer/test_checkpoint.py::test_state_is_the_same_on_other_ranks_and_stages[tied]",
    "optim/test_loss_scaling.py::test_scale_losses_and_weights_are_those_of_one_process_on_three_ranks",
    "optim/test_stepping.py::test_a_compiled_step_is_a_step",
    "plan/test_memory.py::test_model_states_are_those_that_the_engine_counts[gpt2-2]",
    "plan/test_memory.py::test_model_states_are_those_that_the_engine_counts[llama-3]",
    "plan/test_memory.py::test_model_states_are_those_that_the_engine_counts[mlp-2]",
    "recipes/test_recipes.py::test_muon_leaves_what_from_pretrained_loads[3]",
    "sharding/test_init.py::test_embeddings_may_be_resized[2-2]",
    "sharding/test_init.py::test_embeddings_may_be_resized[3-3]",
    "sharding/test_loading.py::test_loaded_model_has_the_bits_of_the_unsharded_one_in_a_whole_program",
    "test_parity.py::test_every_stage_has_the_bits_of_gradients_summed_in_rank_order_on_three_ranks[translator]",
    "test_parity.py::test_every_stage_has_the_bits_of_one_process_on_two_ranks[bert]",
    "test_parity.py::test_every_stage_has_the_bits_of_one_process_on_two_ranks[vit]",
    "test_parity.py::test_every_stage_matches_ddp[llama-3]",
    "test_parity.py::test_every_stage_matches_ddp[mlp-3]",
    "test_two_hosts.py::test_hosts_without_a_common_folder_train_as_one_and_save_all[False]",
}
