"""What users run and no lesson teaches: benchmarks, their peers, and publishing the notebooks."""
