// Scores of patch attention on one core: a part of patch_attention_kernel.cpp, inside its namespaces.
#pragma once

// What is not finite in the columns makes the scores of the rows that see it NaN.
template <class T, class S>
void mark_hidden(const PatchScores& a, int64_t b, int64_t h, int64_t row_begin, int64_t row_end, int64_t j, const Piece& at, T* c) {
  const S* column = static_cast<const S*>(a.column.data) + b * a.column.batch + h * a.column.head + a.column.patch[j];
  for (int64_t x = at.x_begin; x < at.x_end; ++x) {
    T zero = 0;
    for (int64_t i = at.c_begin; i < at.c_end; ++i) zero += T(widen(column[a.column.point[x] + i * a.column.channel])) * T(0);
    if (zero == T(0)) continue;
    for (int64_t p = row_begin; p < row_end; ++p) {
      const T* w = weights_of<T>(a.weights, b, p);
      if (!w || w[a.weights.point[x]] != T(0)) c[(p - row_begin) * a.padded + j] += zero;
    }
  }
}

// The pieces of a call, one after the other, and their packing.
template <class T, class S> struct ScorePieces {
  static constexpr int64_t P = Tiles<T>::PANEL, GROUP = Tiles<T>::GROUP, WIDTH = lanes<T> < GROUP ? GROUP : lanes<T>;
  struct Packed {
    int64_t h, x, channel, block;
    Piece at;
    int64_t columns;
    T *rows, *panels;
    bool hidden;
  };
  const PatchScores& a;
  const PatchPart& part;
  const int64_t b, step, count;
  T *rows[2], *panels[2], *strip;

  bool fill(Packed& p) const {
    p.at = {p.x, smaller(p.x + step, part.point_end), p.channel, smaller(p.channel + DEPTH, a.row.channels)};
    p.columns = smaller(a.keys - p.block, COLUMN_BLOCK), p.hidden = false;
    return true;
  }
  bool next(Packed& p) const {
    p.panels = p.panels == panels[0] ? panels[1] : panels[0];
    if ((p.block += COLUMN_BLOCK) < a.keys) return fill(p);
    p.rows = p.rows == rows[0] ? rows[1] : rows[0], p.block = 0;
    if ((p.channel += DEPTH) < a.row.channels) return fill(p);
    p.channel = 0;
    if (++p.h < part.head_end) return fill(p);
    p.h = part.head_begin, p.x += step;
    return p.x < part.point_end && fill(p);
  }
  Pace pace(const Packed& p, int64_t tiles, int64_t depth) const {
    const int64_t row_units = p.block == 0 ? count : 0;
    Pace pace(row_units, row_units + round_up(p.columns, WIDTH), p.at.x_end - p.at.x_begin, tiles, depth);
    pace.rows = Ahead(a.row, sizeof(S), b, p.h, part.row_begin, count, p.at);
    pace.columns = Ahead(a.column, sizeof(S), b, p.h, p.block, p.columns, p.at);
    return pace;
  }
  void pack(Packed& p, int64_t unit, int64_t end) const {
    const int64_t row_units = p.block == 0 ? count : 0, depth = p.at.size();
    for (; unit < smaller(end, row_units); ++unit) {
      const int64_t row = part.row_begin + unit;
      load_row<T, S>(a.row, b, p.h, row, p.at, weights_of<T>(a.weights, b, row), a.weights.point, false, p.rows + unit * SPACING);
    }
    for (; unit < end; ++unit) {
      const int64_t j = unit - row_units;
      T* to = strip + j % GROUP * SPACING;
      if (j < p.columns) {
        p.hidden |= load_row<T, S>(a.column, b, p.h, p.block + j, p.at, nullptr, nullptr, a.hide, to);
      } else {
        for (int64_t i = 0; i < depth; ++i) to[i] = 0;
      }
      if (j % GROUP == GROUP - 1) transpose<GROUP, P>(strip, SPACING, depth, p.panels + j / P * P * DEPTH + j % P / GROUP * GROUP);
    }
  }
};

template <class T, class S> void scores(const PatchScores& a, int64_t b, const PatchPart& part, T* c, void* scratch) {
  constexpr int64_t P = Tiles<T>::PANEL, L = lanes<T>;
  const int64_t count = part.row_end - part.row_begin;
  if (a.row.channels == 0 || part.point_begin == part.point_end) {
    for (int64_t h = part.head_begin; h < part.head_end; ++h) {
      for (int64_t i = 0; i < count * a.padded; ++i) c[h * part.head_stride + i] = 0;
    }
    return;
  }
  if (a.keys == 0 || count == 0 || part.head_begin == part.head_end) return;
  Arena<T> arena{static_cast<char*>(scratch)};
  ScorePieces<T, S> pieces{a, part, b, chunk_points(a.row.channels), count, {}, {}, nullptr};
  for (T*& p : pieces.rows) p = arena.take(ROW_BLOCK * SPACING);
  for (T*& p : pieces.panels) p = arena.take(round_up(COLUMN_BLOCK, P) * DEPTH);
  pieces.strip = arena.take(Tiles<T>::GROUP * SPACING);
  const RowTiles<T> heights(count);
  typename ScorePieces<T, S>::Packed now{part.head_begin, part.point_begin, 0, 0, {}, 0, pieces.rows[0], pieces.panels[0], false};
  pieces.fill(now);
  {
    Pace first = pieces.pace(now, 1, 0);
    for (int64_t unit = 0; unit < first.units(); ++unit) first.ask_to(unit + AHEAD), pieces.pack(now, unit, unit + 1);
  }
  for (bool more = true; more;) {
    auto next = now;
    more = pieces.next(next);
    const int64_t depth = now.at.size(), panels = (now.columns + P - 1) / P;
    Pace pace = more ? pieces.pace(next, panels * heights.tiles, depth) : Pace();
    T* to = c + now.h * part.head_stride + now.block;
    const bool add = now.x > part.point_begin || now.channel > 0;
    int64_t packed = 0;
    for (int64_t r = 0, i = 0, height; r < count; r += height, ++i) {
      height = heights.rows_at(r, i);
      const T* rows = now.rows + r * SPACING;
      for (int64_t j = 0; j < now.columns; j += P) {
        const T* panel = now.panels + j * DEPTH;
        if (now.columns - j > L) tile_of<T, 2, int(SPACING)>(height, rows, panel, depth, add, to + r * a.padded + j, a.padded, pace);
        else tile_of<T, 1, int(SPACING)>(height, rows, panel, depth, add, to + r * a.padded + j, a.padded, pace);
        pieces.pack(next, packed, pace.ready()), packed = pace.ready();
      }
    }
    for (int64_t j = 0; now.hidden && j < now.columns; ++j) {
      mark_hidden<T, S>(a, b, now.h, part.row_begin, part.row_end, now.block + j, now.at, to - now.block);
    }
    now = next;
  }
}
