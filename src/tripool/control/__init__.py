"""Process control: which processes should run, and what happens when one ends."""
