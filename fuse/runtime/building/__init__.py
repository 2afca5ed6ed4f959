"""Compiling kernels once: the cache of built libraries, measurements that choose between candidates, interrupts."""
