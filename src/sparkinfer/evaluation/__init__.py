"""The A/B judge: an evaluation's record, its statistics and verdict, its report and receipt."""
