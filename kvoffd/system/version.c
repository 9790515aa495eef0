/* Made from all C files: python -m tests.tools.structures. system/structures.py has the same version. */
#include <stdint.h>

const uint32_t kvoffd_version = 0xF5D1160D;
