"""Training of video diffusion models behind the import paths of VideoX-Fun.

Importing this package imports nothing else; the subpackages load what they need when a name is used.
"""

__version__ = "0.1.0"
