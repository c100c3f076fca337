// crc32c.h - checksums of stored bytes: CRC-32C (Castagnoli), the polynomial of iSCSI, ext4 and SSE4.2.
//
// Why this one: it finds every burst of up to 32 bits and every odd number of flipped bits, and processors compute it at
// memory speed, so that it can always be on. It stops no attacker: who can write a file can write its checksum.
//
// One chain of the crc32 instruction is bound by its latency of three cycles; three independent chains fill it (Gopal et
// al. 2011, "Fast CRC computation for iSCSI polynomial using CRC32 instruction"). Joining them needs a crc moved past the
// bytes that follow, a multiplication by x^(8 bytes) modulo the polynomial, which is done by squaring instead of tables.
#pragma once
#include <stdint.h>
#include <stddef.h>
#include <string.h>

#define CRC32C_POLYNOMIAL 0x82f63b78u // bits reflected: the highest bit is the coefficient of x^0

// a * b modulo the polynomial.
static inline uint32_t crc32c_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a & 0x80000000u) product ^= b;
        b = (b >> 1) ^ (b & 1 ? CRC32C_POLYNOMIAL : 0);
    }
    return product;
}

// What `crc` contributes to a checksum when `bytes` more bytes follow: crc(AB) = crc32c_shift(crc(A), bytes of B) ^ crc(B).
static inline uint32_t crc32c_shift(uint32_t crc, uint64_t bytes) {
    uint32_t power = 1u << 23; // x^8
    for (; bytes; bytes >>= 1) {
        if (bytes & 1) crc = crc32c_multiply(crc, power);
        power = crc32c_multiply(power, power);
    }
    return crc;
}

// Without the instruction: four bits a step (about 0.3 GB/s). Both versions extend the checksum of what came before.
static inline uint32_t crc32c_software(uint32_t crc, const void *src, size_t bytes) {
    static const uint32_t nibble[16] = { // x^4 times the 4 bits of the index
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
        0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };
    const unsigned char *p = (const unsigned char *)src;
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= p[i];
        crc = (crc >> 4) ^ nibble[crc & 15];
        crc = (crc >> 4) ^ nibble[crc & 15];
    }
    return ~crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static inline uint32_t crc32c_hardware(uint32_t crc, const void *src, size_t bytes) {
    const unsigned char *p = (const unsigned char *)src;
    uint64_t a = (uint32_t)~crc, word;
    size_t third = bytes / 3 & ~(size_t)7;
    if (third >= 4096) { // below that, joining the chains costs more than it gains
        uint64_t b = 0, c = 0, word_b, word_c;
        for (size_t i = 0; i < third; i += 8) {
            memcpy(&word, p + i, 8);
            memcpy(&word_b, p + third + i, 8);
            memcpy(&word_c, p + 2 * third + i, 8);
            a = __builtin_ia32_crc32di(a, word);
            b = __builtin_ia32_crc32di(b, word_b);
            c = __builtin_ia32_crc32di(c, word_c);
        }
        a = crc32c_shift((uint32_t)a, third) ^ (uint32_t)b;
        a = crc32c_shift((uint32_t)a, third) ^ (uint32_t)c;
        p += 3 * third;
        bytes -= 3 * third;
    }
    for (; bytes >= 8; p += 8, bytes -= 8) {
        memcpy(&word, p, 8);
        a = __builtin_ia32_crc32di(a, word);
    }
    for (; bytes; p++, bytes--) a = __builtin_ia32_crc32qi((uint32_t)a, *p);
    return ~(uint32_t)a;
}
#endif

// The checksum of what `crc` covers and of these bytes after it; 0 covers nothing.
static inline uint32_t crc32c_extend(uint32_t crc, const void *src, size_t bytes) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2")) return crc32c_hardware(crc, src, bytes);
#endif
    return crc32c_software(crc, src, bytes);
}
