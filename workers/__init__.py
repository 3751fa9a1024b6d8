"""What runs beside a GPU, or on the CPU where there is none."""
