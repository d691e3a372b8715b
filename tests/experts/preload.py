"""What the fork server imports once, so that a rank starts in some milliseconds."""

from experts.rank_process import load

load("tiny")
