// Multiplies the jobs that lie at JOBS by the kernels and compares with what must come out. Runs
// alone in an emulator (bochs.py): it begins in 32-bit mode and makes its own tables of pages.
#include <immintrin.h>
#include <stdint.h>

typedef int64_t i;
typedef void kernel(i x, i ldx, i figures, i ldf, i rows, i panel, i count, i out, i ldo, i next,
                    i tile_rows);
kernel KERNELS;
static kernel *const kernels[] = {KERNELS};

__asm__(".section .start, \"ax\"\n"
        ".code32\n"
        ".globl _start\n"
        "_start:\n"
        "  movl $0x11003, 0x10000\n"  // one table of tables, one page of a gigabyte
        "  movl $0, 0x10004\n"
        "  movl $0x83, 0x11000\n"
        "  movl $0, 0x11004\n"
        "  mov $0x10000, %eax\n"
        "  mov %eax, %cr3\n"
        "  mov %cr4, %eax\n"
        "  or $0x40620, %eax\n"  // PAE, FXSR, XMM exceptions, XSAVE
        "  mov %eax, %cr4\n"
        "  mov $0xc0000080, %ecx\n"
        "  rdmsr\n"
        "  or $0x100, %eax\n"  // 64-bit mode
        "  wrmsr\n"
        "  mov %cr0, %eax\n"
        "  or $0x80000002, %eax\n"
        "  mov %eax, %cr0\n"
        "  ljmp $" CODE_64 ", $wide\n"
        ".code64\n"
        "wide:\n"
        "  xor %ecx, %ecx\n"
        "  xor %edx, %edx\n"
        "  mov $0x600e7, %eax\n"  // vectors of 512 bits and tiles
        "  xsetbv\n"
        "  mov $0x4000000, %rsp\n"
        "  call check\n"
        ".previous\n");

static void out_byte(uint16_t port, char c) {
  __asm__ volatile("outb %0, %1" : : "a"(c), "Nd"(port));
}
static void say(const char *text) {
  for (; *text; text++) out_byte(0xe9, *text);
}
static void number(i value) {
  char text[24], *at = text + 23;
  for (*at = 0; value || !*at; value /= 10) *--at = '0' + value % 10;
  say(at);
}
static char *bytes(char **at, i size) {
  char *here = *at;
  *at += (size + 63) / 64 * 64;
  return here;
}

// Four times -1 times 1. Bochs 3.0 takes the signed bytes for unsigned ones.
static int signed_sum(void) {
  static struct { uint8_t palette, zero[15]; uint16_t columns[16]; uint8_t rows[16]; } layout
      __attribute__((aligned(64))) = {1, {0}, {4, 4, 4}, {1, 1, 1}};
  static int8_t x[4] = {-1, -1, -1, -1};
  static uint8_t w[4] = {1, 1, 1, 1};
  static int sum;
  _tile_loadconfig(&layout);
  _tile_zero(0);
  _tile_loadd(1, x, 64);
  _tile_loadd(2, w, 64);
  _tile_dpbsud(0, 1, 2);
  _tile_stored(0, &sum, 64);
  _tile_release();
  return *(volatile int *)&sum;
}

void check(void) {
  say(signed_sum() == -4 ? "\nsigned: right\n" : "\nsigned: wrong\n");
  char *at = (char *)JOBS;
  i done = 0;
  for (;;) {
    i *h = (i *)bytes(&at, 64);
    i form = h[0], rows = h[1], ldx = h[2], ldf = h[3], count = h[4], panels = h[5], size = h[6];
    if (form < 0) break;
    char *x = bytes(&at, rows * ldx), *figures = bytes(&at, rows * ldf);
    char *panel = bytes(&at, panels * size);
    i ldo = panels * 128, words = rows * ldo / 4;
    uint32_t *want = (uint32_t *)bytes(&at, rows * ldo), *out = (uint32_t *)0x8000000;
    for (i n = 0; n < words + 32; n++) out[n] = 0xabababab;
    for (i p = 0; p < panels; p++)
      kernels[form]((i)x, ldx, (i)figures, ldf, rows, (i)(panel + p * size), count,
                    (i)(out + p * 32), ldo, p + 1 < panels ? (i)(panel + (p + 1) * size) : 0,
                    h[7]);
    i wrong = 0;
    for (i n = 0; n < words; n++) wrong += out[n] != want[n];
    for (i n = words; n < words + 32; n++) wrong += out[n] != 0xabababab;
    if (wrong) {
      say("job "), number(done), say(": form "), number(form), say(", "), number(rows);
      say(" rows, "), number(wrong), say(" numbers differ\n");
    }
    done++;
  }
  say("done: "), number(done), say("\n");
  for (const char *c = "Shutdown"; *c; c++) out_byte(0x8900, *c);
  for (;;) __asm__ volatile("hlt");
}
