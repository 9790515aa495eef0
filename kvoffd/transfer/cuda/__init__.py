"""GPU memory: the driver's calls, handles of other processes' memory, an engine over copy engines. No torch."""
