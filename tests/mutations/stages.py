"""x"""

from mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
