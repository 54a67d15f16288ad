"""In-image measurers: each module runs as one job and measures; it never judges."""
