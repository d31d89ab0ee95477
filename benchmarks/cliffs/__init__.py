"""What users run, beside the loop that a careful user writes for it."""
