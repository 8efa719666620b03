"""Speed of a loaded target: what runs (workloads), how (measure), how it is shown (report)."""
