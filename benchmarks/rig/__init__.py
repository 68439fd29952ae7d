"""What the benchmark scripts share: cases, honest timing, facts about the machine, tables."""
