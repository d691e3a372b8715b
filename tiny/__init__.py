"""Makes the bundled model (`make tiny`): a corpus from a teacher, and the lesson of the draft layer.

Not part of the installed package.
"""
