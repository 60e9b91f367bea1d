"""TPUs: whole steps as programs that XLA compiles, through jax."""
