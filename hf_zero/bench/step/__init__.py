"""Training steps: time, memory and traffic of hf_zero beside other engines, a fresh process a rank for every run."""
