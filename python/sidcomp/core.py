"""The C core, as the extension module `sidcomp._core` binds it: codecs, exchanges and planners on addresses.

The package imports it from here: tools that read imports do not see an extension module.
"""

from sidcomp._core import *  # noqa: F403
