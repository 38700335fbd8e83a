"""The version of the package, for modules inside it as well."""

__version__ = "0.1.0"
