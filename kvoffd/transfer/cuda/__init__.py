"""GPU memory: maps other processes' memory and copies with the GPU's copy engines. Uses the CUDA driver, not torch."""
