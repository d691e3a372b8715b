"""Plain torch versions of every op, under the names the fast ones use: oracle, documentation and fallback."""
