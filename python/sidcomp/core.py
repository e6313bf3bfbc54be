"""The names of the extension module `sidcomp._core`: codecs, exchanges and planners of the C core, by
address.

The package imports them from here, because tools that check imports do not see an extension module.
"""

from sidcomp._core import *  # noqa: F403
