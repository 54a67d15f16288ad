"""In-image quantizers: each module runs as one job and writes a checkpoint; it never judges what it wrote."""
